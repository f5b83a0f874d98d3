"""Texts that the vocabulary cannot write are left out of what a grammar allows, so that no row runs into one; the default model's lacks
some control characters and all characters from U+40000 to U+BFFFF."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import apply_plan
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.grammar_cache import GrammarCache
from meshlm.detokenizer.grammars import Grammars
from meshlm.detokenizer.spelling import Spelling
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.runtime.errors import RequestError
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output import grammars as of_rows
from meshlm.workers.output.matchers import Matchers
from meshlm.workers.rows.step_columns import COMPUTED

pytestmark = pytest.mark.model
EOS, ROW = 2, np.array([0], np.int32)
LACKED = "\U0004823b"
OPEN = {"type": "object", "additionalProperties": False}
texts = st.text(max_size=5)


class Model:
    """Writes at random within a request's grammar, as a worker would; without the rest of the mesh."""

    def __init__(self, path: Path) -> None:
        loaded = tokenizer_files.load(path)
        self.vocabulary = Vocabulary(loaded, 49152, (EOS,))
        self.spelling = Spelling(TokenTable(loaded))
        self.grammars = GrammarCache(Grammars({}, can_write=self.spelling.can_write).translated)

    def writes(self, kind: str, value: Any, draws: "np.random.Generator") -> str:
        """RequestError says what is refused."""
        compiled = self.grammars.compile(Grammar(GrammarKind(kind), json.dumps(value), "field", any_whitespace=False))
        rows = of_rows.Grammars(Matchers(lambda: self.vocabulary))
        assert rows.compile(compiled.text) == ""
        new = NewRow(Row(0), ROW.tobytes(), 1, b"", SamplingParams(eos_token_ids=(EOS,)), (compiled,))
        apply_plan(rows, StepPlan(1, StepId(1), b"", b"", b"", b"", 0, new_rows=[new]))
        found = list[int]()
        while EOS not in found:
            constraint = rows.of_step(ROW)
            mask = constraint.mask()
            assert mask is not None
            assert not constraint.failed, (constraint.failed, found)
            found.append(int(draws.choice(np.flatnonzero(mask.allowed(49152)[0]))))
            constraint.after_head(np.array(found[-1:], np.int32), COMPUTED)
        return b"".join(map(self.vocabulary.bytes_of, found[:-1])).decode()


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return Model(smollm2)


some = given(given_texts=st.lists(texts, min_size=1, max_size=5), seed=st.integers(0, 2**32))


@some
@example(given_texts=["ab\x1dc", "abd", "", "a"], seed=3)
@example(given_texts=[LACKED], seed=0)
@settings(max_examples=60, deadline=None)
def test_a_choice_of_any_text(model: Model, given_texts: list[str], seed: int) -> None:
    can_be = list(filter(model.spelling.can_write, given_texts))
    if can_be:
        assert model.writes("choice", given_texts, np.random.default_rng(seed)) in can_be
    else:
        with pytest.raises(RequestError, match="field: this model's vocabulary has no tokens that write"):
            model.writes("choice", given_texts, np.random.default_rng(seed))


@some
@example(given_texts=["a" + LACKED, "ab"], seed=3)
@settings(max_examples=60, deadline=None)
def test_constants_of_any_text(model: Model, given_texts: list[str], seed: int) -> None:
    """As choices, constants and names of properties of a schema. JSON escapes control characters, so those can be written there."""
    first, *others = given_texts
    of_them = {"anyOf": [{"enum": given_texts}, {"const": {first: others}}]}
    named = {name: {"const": 1} for name in given_texts}
    schema = {**OPEN, "properties": {**named, "x": of_them, "y": {"const": "é"}}, "required": ["x", "y"]}
    can_be = [text for text in given_texts if model.spelling.can_write(json.dumps(text, ensure_ascii=False))]
    if not can_be:
        with pytest.raises(RequestError, match="field: this model's vocabulary has no tokens that write"):
            model.writes("json_schema", schema, np.random.default_rng(seed))
        return
    found = json.loads(model.writes("json_schema", schema, np.random.default_rng(seed)))
    assert found["x"] in can_be or found["x"] == {first: others}
    assert found["y"] == "é"
    assert {*found} <= {"x", "y", *can_be}


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LACKED},
        {"enum": [["a", LACKED]]},
        {**OPEN, "required": [LACKED], "properties": {LACKED: True}},
        {"type": "object", "required": [LACKED]},
        {"type": "array", "minItems": 1, "items": {"const": {LACKED: 1}}},
    ],
)
def test_a_schema_of_which_no_text_can_be_written(model: Model, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=LACKED):
        model.grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "field"))


def test_a_pattern_that_needs_such_a_byte_is_refused_by_the_byte(model: Model) -> None:
    compiled = model.grammars.compile(Grammar(GrammarKind.REGEX, f"ab{LACKED}", "field"))
    assert "no token with the byte 0xf1" in of_rows.Grammars(Matchers(lambda: model.vocabulary)).compile(compiled.text)


def test_tokens_of_several_bytes_make_up_a_text() -> None:
    tokens = {text: index for index, text in enumerate(["é", "éa", "<x>", "日本", "日", "語", "\n"])}
    spelling = Spelling(
        TokenTable(LoadedTokenizer(Tokenizer(models.WordLevel(tokens, "é")), {}, frozenset({2}), False))
    )
    can = {text: spelling.can_write(text) for text in ("éaé\n", "日本語日", "本", "é本é", "\t", "<x>é", "", "plain")}
    assert can == {
        "éaé\n": True,
        "日本語日": True,
        "本": False,
        "é本é": False,
        "\t": False,
        "<x>é": False,
        "": True,
        "plain": True,
    }
