"""Rows with a grammar: whatever is drawn from their masks fits it, and a matcher is a function of the row's tokens."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_vocabulary import apply_plan
from grammar_rows import EOS, VOCAB, allowed, allowed_of, new, of_regex, plan, push
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models

from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.vocabulary import CHARACTER, Vocabulary
from meshlm.workers.output import grammars as of_rows
from meshlm.workers.output.grammars import Grammars
from meshlm.workers.output.matchers import Matchers
from meshlm.workers.rows.step_columns import Mark

pytestmark = pytest.mark.model
SHORT = {"type": "string", "maxLength": 3}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": SHORT, "b": {"type": "integer", "minimum": -5, "maximum": 99}}, "required": ["b"]},
    {"type": "array", "items": {"enum": ["x", 1, None, {"k": [True]}]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"const": "no"}, {"type": "string", "pattern": "^[a-f]{2,3}-[0-9]$"}, {"type": "boolean"}]},
    {
        "$defs": {"tree": {"type": "object", "properties": {"v": {"enum": [True]}, "l": {"$ref": "#/$defs/leaf"}}, "required": ["v"]},
                  "leaf": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
        "$ref": "#/$defs/tree",
    },
    {"type": "string", "format": "date"},
    {"type": "object", "properties": {"q\u00e9": {"type": "null"}}, "required": ["q\u00e9"], "maxProperties": 2,
     "additionalProperties": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20}},
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), VOCAB, (EOS,))


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(Matchers(lambda: vocabulary))


def of_schema(schema: dict[str, Any]) -> str:
    closed = (
        {**schema, "additionalProperties": schema.get("additionalProperties", False)}
        if "properties" in schema
        else schema
    )
    return LLMatcher.grammar_from_json_schema(json.dumps({**closed, "x-guidance": {"whitespace_flexible": False}}))


def written(made: Grammars, choose: Callable[[list[int]], int], limit: int = 300) -> list[int]:
    """Tokens of row 0 up to its end."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        tokens.append(choose(allowed(made)))
        push(made, tokens[-1])
        assert len(tokens) < limit, "no end"
    return tokens


def drawing(vocabulary: Vocabulary, seed: int) -> Callable[[list[int]], int]:
    """Draws among the tokens that may come; rather those that close something, so that a text ends."""
    draws, closing = (
        np.random.default_rng(seed),
        {vocabulary.tokens_of(text)[0] for text in (b'"', b"}", b"]", b"null")},
    )

    def choose(tokens: list[int]) -> int:
        some = [EOS] if EOS in tokens else sorted(closing.intersection(tokens))
        return int(draws.choice(some if some and draws.random() < 0.6 else tokens))

    return choose


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.bytes_of(token) for token in tokens if token != EOS).decode()


@settings(max_examples=25, deadline=None)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 1 << 32))
def test_whatever_is_drawn_is_valid(vocabulary: Vocabulary, schema: dict[str, Any], seed: int) -> None:
    made = Grammars(Matchers(lambda: vocabulary))
    apply_plan(made, plan(new(of_schema(schema))))
    text = text_of(vocabulary, written(made, drawing(vocabulary, seed)))
    jsonschema.validate(json.loads(text), schema)


@settings(max_examples=15, deadline=None)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 1 << 32), cut=st.integers(0, 20))
def test_a_row_that_begins_anew_goes_on(vocabulary: Vocabulary, schema: dict[str, Any], seed: int, cut: int) -> None:
    """After a preemption, or the death of any process: the masks are those that it would have had."""
    made = Grammars(Matchers(lambda: vocabulary))
    apply_plan(made, plan(new(of_schema(schema))))
    tokens = written(made, drawing(vocabulary, seed))
    other = Grammars(Matchers(lambda: vocabulary))
    cut = min(cut, len(tokens) - 1)
    apply_plan(other, plan(new(of_schema(schema), output=tuple(tokens[:cut]))))
    one = Grammars(Matchers(lambda: vocabulary))
    apply_plan(one, plan(new(of_schema(schema))))
    for token in tokens[:cut]:
        push(one, token)
    assert allowed(other) == allowed(one)
    assert tokens[cut] in allowed(other)


def test_the_end_comes_only_where_the_grammar_may_end(grammars: Grammars, vocabulary: Vocabulary) -> None:
    apply_plan(grammars, plan(new(of_regex("[0-9]{2,3}"))))
    assert EOS not in allowed(grammars)
    digit = vocabulary.tokens_of(b"7")[0]
    push(grammars, digit)
    assert EOS not in allowed(grammars)
    push(grammars, digit)
    assert EOS in allowed(grammars)
    push(grammars, digit)
    assert allowed(grammars) == [EOS]
    for _ in range(2):  # with ignore_eos the text goes on: with ends
        push(grammars, EOS)
        assert allowed(grammars) == [EOS]


def test_min_tokens_gives_way_to_the_grammar_alone(grammars: Grammars, vocabulary: Vocabulary) -> None:
    digit = vocabulary.tokens_of(b"7")[0]
    apply_plan(grammars, plan(new(of_regex("[0-9]{1,3}"), min_tokens=9), new(of_regex("[0-9]{1,3}"), 1)))
    for row in (0, 1):
        push(grammars, digit, row)
    assert EOS not in allowed(grammars)
    assert EOS in allowed(grammars, 1)
    for _ in range(2):
        push(grammars, digit)
    assert allowed(grammars) == [EOS]


def test_ids_that_are_allowed_or_bad(grammars: Grammars, vocabulary: Vocabulary) -> None:
    one, two, three = (vocabulary.tokens_of(digit)[0] for digit in (b"1", b"2", b"3"))
    pattern = of_regex("[1-3]{1,4}")
    bad = ((one,), (two, three))
    apply_plan(grammars, plan(new(pattern, allowed_token_ids=(one, two)), new(pattern, 1, bad_words_token_ids=bad)))
    assert allowed(grammars) == sorted((one, two))
    assert one not in allowed(grammars, 1)
    assert three in allowed(grammars, 1)
    push(grammars, two, 0)
    push(grammars, two, 1)
    assert EOS in allowed(grammars), "the end is the grammar's to allow"
    assert three not in allowed(grammars, 1)


def test_a_row_without_any_token_fails_and_others_go_on(grammars: Grammars, vocabulary: Vocabulary) -> None:
    one, two = (vocabulary.tokens_of(digit)[0] for digit in (b"1", b"2"))
    apply_plan(grammars, plan(new(of_regex("1{3}"), allowed_token_ids=(two,)), new(of_regex("1{3}"), 1)))
    constraint = grammars.of_step(np.array([7, 0, 1], np.int32))
    mask = constraint.mask()
    assert mask is not None
    assert list(constraint.failed) == [1]
    assert "allowed_token_ids" in constraint.failed[1].message
    assert mask.lines.tolist() == [1, 2]
    assert one in np.flatnonzero(mask.allowed(VOCAB)[1])
    assert mask.of(np.array([2, 5])).lines.tolist() == [0]


def test_the_constraint_begins_behind_the_reasoning(grammars: Grammars, vocabulary: Vocabulary) -> None:
    reasoning = vocabulary.tokens_of(b"hm {1} </think")
    apply_plan(grammars, plan(new(of_regex("[0-9]"), after="</think>")))
    for token in reasoning:
        assert len(allowed(grammars)) >= VOCAB - 8
        push(grammars, token)
    push(grammars, vocabulary.tokens_of(b">")[0])
    assert {vocabulary.bytes_of(token) for token in allowed(grammars)} == {b"%d" % digit for digit in range(10)}
    again = Grammars(Matchers(lambda: vocabulary))
    apply_plan(
        again, plan(new(of_regex("[0-9]"), after="</think>", output=(*reasoning, vocabulary.tokens_of(b">")[0])))
    )
    assert allowed(again) == allowed(grammars)


def test_a_token_that_reaches_beyond_the_reasoning(grammars: Grammars, vocabulary: Vocabulary) -> None:
    (across,) = vocabulary.tokens_of(b">\n")[:1]
    assert vocabulary.bytes_of(across).startswith(b">")
    rest = vocabulary.bytes_of(across)[1:]
    apply_plan(
        grammars, plan(new(of_regex("\n?[0-9]"), after="</think>", output=(*vocabulary.tokens_of(b"x</think"), across)))
    )
    starts = {vocabulary.bytes_of(token)[:1] for token in allowed(grammars)}
    assert (b"\n" in starts) == (not rest)


def test_what_cannot_be_compiled_is_told(grammars: Grammars) -> None:
    for _ in range(2):  # from the cache, too
        assert grammars.compile("start: nobody")
    apply_plan(grammars, plan(new("start: nobody")))
    constraint = grammars.of_step(np.array([0], np.int32))
    constraint.mask()
    assert constraint.failed[0]


def test_a_matcher_that_meets_a_limit_fails_its_row(grammars: Grammars, vocabulary: Vocabulary) -> None:
    text = of_regex("((a{1,1000}){1,1000}){1,1000}")
    assert not grammars.compile(text)
    apply_plan(grammars, plan(new(text)))
    for _ in range(50):
        constraint = grammars.of_step(np.array([0], np.int32))
        constraint.mask()
        if constraint.failed:
            break
        push(grammars, vocabulary.tokens_of(b"a")[0])
    assert "lexer" in constraint.failed[0].message


def test_no_mask_takes_long(grammars: Grammars, vocabulary: Vocabulary) -> None:
    """A grammar that has ever more readings of its text ends by a limit, before a mask of it keeps the rows beside it waiting."""
    apply_plan(grammars, plan(new('start: e\ne: e e | "a" | "aa" | "aaa" | "b"')))
    dice, longest, failed = np.random.default_rng(0), 0.0, ""
    for _ in range(300):
        begun = time.thread_time()
        constraint = grammars.of_step(np.array([0], np.int32))
        mask = constraint.mask()
        longest = max(longest, time.thread_time() - begun)
        assert mask is not None
        if constraint.failed:
            failed = constraint.failed[0].message
            break
        push(grammars, int(dice.choice([token for token in np.flatnonzero(mask.allowed(VOCAB)[0]) if token != EOS])))
    assert "Too many items" in failed
    assert longest < 0.1, "350 ms, with the limit of before"


def test_rows_are_forgotten(grammars: Grammars) -> None:
    apply_plan(grammars, plan(new(of_regex("a")), new(of_regex("a"), 1)))
    apply_plan(grammars, plan(removed=(0,)))
    assert list(grammars.rows) == [1]
    plain = NewRow(Row(1), b"", 0, b"", SamplingParams())
    apply_plan(grammars, plan(plain))
    assert not grammars.of_step(np.array([0, 1], np.int32))
    assert grammars.of_step(np.array([0, 1], np.int32)).mask() is None


def test_tokens_are_read_when_they_are_there(grammars: Grammars, vocabulary: Vocabulary) -> None:
    """Of a step on a device that computes later: nobody waits before the next mask, and no more than a few steps long."""
    waited = []

    class Later(Mark):
        def __init__(self, tokens: "np.ndarray[Any, Any]", token: int) -> None:
            self._tokens, self._token = tokens, token

        def synchronize(self) -> None:
            waited.append(self._token)
            self._tokens[0] = self._token

    digit = vocabulary.tokens_of(b"7")[0]
    apply_plan(grammars, plan(new(of_regex("7{2}"))))
    for _ in range(2):
        tokens = np.array([-1], np.int32)
        grammars.of_step(np.array([0], np.int32)).after_head(tokens, Later(tokens, digit))
    assert not waited
    assert allowed(grammars) == [EOS]
    assert waited == [digit, digit]
    for _ in range(of_rows.MAX_UNREAD + 1):
        tokens = np.array([-1], np.int32)
        grammars.of_step(np.array([0], np.int32)).after_head(tokens, Later(tokens, EOS))
    assert len(waited) == 3 + of_rows.MAX_UNREAD


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Metaspace(), None])
def test_tokenizers_that_the_library_reads_or_is_told(decoder: Any) -> None:
    """As those of .gguf and tokenizer.json files, and kinds that it does not know."""
    letters = "abc0123\u2581"
    tokenizer = Tokenizer(models.BPE(vocab={letter: nth for nth, letter in enumerate(letters)}, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    loaded = tokenizer_files.LoadedTokenizer(tokenizer, {}, frozenset({8}), isinstance(decoder, decoders.ByteLevel))
    made = Grammars(Matchers(lambda: Vocabulary(loaded, 12, (8,))))
    apply_plan(made, plan(new(of_regex("[ab][0-2]"), eos=8)))
    seen = [allowed_of(made, 12)]
    for token in (1, 4):
        push(made, token)
        seen.append(allowed_of(made, 12))
    assert seen == [[0, 1], [3, 4, 5], [8]]


def test_masks_near_a_length_are_those_without_shortcuts(vocabulary: Vocabulary) -> None:
    """Tokens of few characters are allowed at once; which, depends on what the string may still hold."""
    text = of_schema({"type": "string", "maxLength": 24})
    plain = vocabulary.tokenizer.with_slices([])
    assert vocabulary.tokenizer.general_slices()[1].startswith(CHARACTER + "{1,"), "the library's own sets have changed"
    fast, slow = (LLMatcher(tokenizer, text) for tokenizer in (vocabulary.tokenizer, plain))
    masks = np.empty((2, vocabulary.num_words), np.int32)
    for token in vocabulary.tokens_of(b'"' + b"a b\\n\xc3\xa9z" * 3 + b'abcdef"'):
        for matcher, words in zip((fast, slow), masks, strict=True):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            assert matcher.consume_token(token)
        assert np.array_equal(*masks)
    assert fast.is_accepting()
