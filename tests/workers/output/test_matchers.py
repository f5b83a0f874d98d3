"""Masks behind drafts are those that the row would have if these were known, and whichever are accepted it goes on as without."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from meshlm.protocol.grammar import Grammar, GrammarKind, ThinkingBudget
from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime import grammars as limits
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output.matchers import Matchers, RowBegins, Turn, may_come
from meshlm.workers.rows.changes import I32

pytestmark = pytest.mark.model
VOCAB, EOS, OTHER_EOS = 49152, 2, 0
CLOSE = "</think>"
CALL = ' a<tool_call>\n{"name": "f", "arguments": {"x": "one two"}}\n</tool_call> b b'
SCHEMA = json.dumps({
    "type": "object", "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": [1, None, True]}}, "required": ["a", "b"],
    "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
})  # fmt: skip
OBJECT = LLMatcher.grammar_from_json_schema(SCHEMA)
DIGITS = LLMatcher.grammar_from_regex("[0-9]{2,5}")
TOO_MANY_STATES = LLMatcher.grammar_from_regex("((a{1,1000}){1,1000}){1,1000}")
TOO_MANY_ITEMS = 'start: e\ne: e e | "a" | "aa" | "aaa" | "b"'
CALLS = 'start: "f(" arg ("," arg)* ")" | "none"\narg: /[a-z]{1,8}/ "=" ("true" | /[0-9]+/)'


def form(text: str = "", thinking: ThinkingBudget | None = None, **more: Any) -> Grammar:
    return Grammar(GrammarKind.COMPILED, text, "field", thinking=thinking, **more)


def budget(num_tokens: int, **more: Any) -> ThinkingBudget:
    return ThinkingBudget(num_tokens, CLOSE, **more)


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), VOCAB, (EOS, OTHER_EOS))


FORMS = {
    "schema": form(OBJECT),
    "regex": form(DIGITS),
    "choice": form(LLMatcher.grammar_from_lark('start: "yes" | "yes, indeed" | "no"')),
    "lark": form(LLMatcher.grammar_from_lark(CALLS)),
    "behind reasoning": form(OBJECT, begins_after=CLOSE),
    "behind reasoning that calls may end": form(DIGITS, begins_after=CLOSE, calls="hermes", tools=("f",)),
    "behind reasoning that opens": form(DIGITS, budget(3, open="<think>", assumed=False), begins_after=CLOSE),
    "budget": form("", budget(3, open="<think>")),
    "budget, then a schema": form(OBJECT, budget(2), begins_after=CLOSE),
    "budget of nothing": form(DIGITS, budget(0), begins_after=CLOSE),
    "budget and calls": form("", budget(2), calls="hermes", tools=("f",)),
    "too many states": form(TOO_MANY_STATES),
    "too many items": form(TOO_MANY_ITEMS),
}
SAID = [
    "",
    " a b c d e f g h",
    " hm</think>",
    " a</ b</think>",
    "<think> a b</think>",
    "<think>",
    CALL,
    " <tool_call> b b b b",
    "aaaa",
]
PARAMS: list[dict[str, Any]] = [
    {}, {}, {}, {"min_tokens": 7}, {"bad_words_token_ids": ((3,), (34, 34))}, {"allowed_token_ids": tuple(range(0, VOCAB, 2))},
]  # fmt: skip


class Row:
    """A row whose known tokens are in `output`, and what it would be if it began with others."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, sampling: SamplingParams) -> None:
        self._vocabulary, self._grammar, self._sampling = vocabulary, grammar, sampling
        self._matchers, self._fresh = Matchers(lambda: vocabulary), Matchers(lambda: vocabulary)
        self._sent = -1
        self.output: list[int] = []

    def _words(self, count: int) -> I32:
        return np.full((count, self._vocabulary.num_words), 0x5A5A5A5A, np.int32)

    def verified(self, drafts: list[int]) -> tuple[I32, list[tuple[int, str]]]:
        """The masks of a step, and what fails behind how many drafts."""
        words, begins, pushed = self._words(1 + len(drafts)), [], []
        if self._sent < 0:
            begins = [RowBegins(1, self._sampling, self._grammar, np.array(self.output, np.int32).tobytes())]
        else:
            pushed = [(1, self.output[self._sent :])]
        self._sent = len(self.output)
        turned = self._matchers.turn(Turn([1], begins, pushed, drafts={1: drafts} if drafts else {}), words)
        return words, [*((0, error) for error in turned.errors.values()), *turned.behind.values()]

    def begun(self, output: list[int]) -> tuple[I32, str]:
        """The mask of one that begins with these tokens, and why it cannot go on."""
        words = self._words(1)
        begins = RowBegins(1, self._sampling, self._grammar, np.array(output, np.int32).tobytes())
        return words[0], self._fresh.turn(Turn([1], [begins]), words).errors.get(1, "")


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS)), params=st.sampled_from(PARAMS), said=st.sampled_from(SAID), seed=st.integers(0, 1 << 32),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=10),
)  # fmt: skip
def test_masks_are_those_of_the_plain_path(
    vocabulary: Vocabulary, name: str, params: dict[str, Any], said: str, seed: int, sizes: list[int]
) -> None:
    dice, script = np.random.default_rng(seed), vocabulary.tokens_of(said.encode())
    row = Row(vocabulary, FORMS[name], SamplingParams(eos_token_ids=(EOS,), **params))

    def drawn(words: I32, place: int) -> int:
        """A token that the mask allows: what was to be said, the end, or any."""
        if place < len(script) and may_come(words, script[place]):
            return script[place]
        if may_come(words, EOS) and dice.random() < 0.3:
            return EOS
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB])
        return int(dice.choice(allowed))

    for size in sizes:
        drafts, expected, failed = list[int](), list[I32](), list[tuple[int, str]]()
        for nth in range(size + 1):
            words, error = row.begun([*row.output, *drafts])
            expected.append(words)
            if error:
                failed = [(nth, error)]
                break
            if nth < size and dice.random() < 0.15:  # a wrong draft, most likely
                drafts.append(int(dice.choice([-1, EOS, OTHER_EOS, VOCAB + 7, int(dice.integers(VOCAB))])))
                if not may_come(words, drafts[-1]):
                    break
            elif nth < size:
                drafts.append(drawn(words, len(row.output) + nth))
        num_right = len(expected) - 1
        drafts += dice.integers(VOCAB, size=size - len(drafts)).tolist()
        masks, found = row.verified(drafts)
        assert found == failed
        assert np.array_equal(masks[: len(expected)], expected)
        assert (masks[len(expected) :] == -1).all(), "any token, behind a draft that is never accepted"
        if failed and failed[0][0] == 0:
            return
        given = int(dice.integers(num_right + 2)) - 1  # drafts that are accepted; -1: the row gets nothing in this step
        if failed and given == num_right:
            return
        if given >= 0:
            row.output += [*drafts[:given], drawn(expected[given], len(row.output) + given)]


@pytest.mark.parametrize(
    ("name", "text", "error"), [("too many items", b"aaa", "Too many items"), ("too many states", b"a", "lexer error")]
)
def test_an_error_behind_drafts_is_none_before(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, name: str, text: bytes, error: str
) -> None:
    """The library's matcher never leaves an error, and all matchers of a grammar share a lexer: refused drafts leave no trace."""
    monkeypatch.setattr(limits, "STEP_MAX_ITEMS", 300)
    row, token = Row(vocabulary, FORMS[name], SamplingParams(eos_token_ids=(EOS,))), vocabulary.tokens_of(text)[0]
    other = RowBegins(2, SamplingParams(eos_token_ids=(EOS,)), FORMS[name], b"")
    for num_known in (0, 0, 1, 7):
        row.output = [token] * num_known
        _, ((num_drafts, found),) = row.verified([token] * 400)
        assert error in found
        assert 10 < num_drafts + num_known < 400
        words = np.zeros((1, vocabulary.num_words), np.int32)
        assert not row._matchers.turn(Turn([2], [other]), words).errors
    for row.output in ([token] * (7 + count) for count in (*range(0, num_drafts, 60), num_drafts - 1)):
        words, failed = row.verified([])
        assert not failed
        assert np.array_equal(words[0], row.begun(row.output)[0])
    row.output = [token] * (7 + num_drafts)
    assert row.verified([])[1] == [(0, found)]


def test_several_rows_with_drafts(vocabulary: Vocabulary) -> None:
    """Those of some end early; each has its own lines, in any number of threads."""
    (one,) = vocabulary.tokens_of(b"1")
    made, grammar = Matchers(lambda: vocabulary), FORMS["regex"]
    sampling, drafts = (
        SamplingParams(eos_token_ids=(EOS,)),
        {nth: [one] * (nth % 4) + [EOS] * (nth % 3) for nth in range(24)},
    )
    turn = Turn([*drafts], [RowBegins(nth, sampling, grammar, b"") for nth in drafts], drafts=drafts)
    words = []
    for made._num_threads in (1, 4):
        words.append(np.empty((sum(turn.num_lines), vocabulary.num_words), np.int32))
        assert not made.turn(turn, words[-1]).behind
    assert np.array_equal(words[0], words[1])
    row = Row(vocabulary, grammar, sampling)
    lines = np.split(words[0], np.cumsum(turn.num_lines)[:-1])
    assert all(np.array_equal(lines[nth], row.verified(drafts[nth])[0]) for nth in drafts)


def texts_of(vocabulary: Vocabulary, words: I32) -> set[bytes]:
    """The tokens that a mask allows."""
    return {
        vocabulary.bytes_of(int(token))
        for token in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    }


def test_reasoning_that_ends_in_a_draft(vocabulary: Vocabulary) -> None:
    """In a token that holds the first of what follows, too; as often as the draft is refused, and then accepted."""
    across = next(text for token in range(VOCAB) if len(text := vocabulary.bytes_of(token)) == 2 and text[:1] == b">")
    pattern = "[" + re.escape(across[1:].decode()) + "]?[0-9]{2}"
    row = Row(
        vocabulary,
        form(LLMatcher.grammar_from_regex(pattern), begins_after=CLOSE),
        SamplingParams(eos_token_ids=(EOS,)),
    )
    (last,) = (token for token in range(VOCAB) if vocabulary.bytes_of(token) == across)
    (digit,) = vocabulary.tokens_of(b"7")
    drafts = [*vocabulary.tokens_of(b" hm</think"), last, digit, digit, EOS]
    for num_accepted in (0, 0, 3, 2):
        words, failed = row.verified(drafts)
        assert not failed
        free, behind = len(drafts) - 3, texts_of(vocabulary, words[-4])
        assert all(len(texts_of(vocabulary, each)) > 40_000 and not may_come(each, EOS) for each in words[:free])
        assert behind == texts_of(vocabulary, words[-3]) == {b"%d" % number for number in range(10)}
        assert [
            np.flatnonzero(np.unpackbits(each.view(np.uint8), bitorder="little")).tolist() for each in words[-2:]
        ] == [[OTHER_EOS, EOS]] * 2
        row.output += drafts[:num_accepted]
        drafts = drafts[num_accepted:]


def test_a_budget_that_is_spent_in_a_draft(vocabulary: Vocabulary) -> None:
    row = Row(vocabulary, form(DIGITS, budget(2), begins_after=CLOSE), SamplingParams(eos_token_ids=(EOS,)))
    (letter,), closing = vocabulary.tokens_of(b" a"), vocabulary.tokens_of(CLOSE.encode())
    words, _ = row.verified([letter] * 4)
    assert [may_come(each, letter) for each in words] == [True, True, False, True, True]
    assert texts_of(vocabulary, words[2]) == {vocabulary.bytes_of(closing[0])}
    words, _ = row.verified([letter, letter, *closing])  # nothing was accepted
    assert [may_come(each, token) for each, token in zip(words, [letter, letter, *closing], strict=False)] == [True] * (
        2 + len(closing)
    )
    assert texts_of(vocabulary, words[-1]) == {b"%d" % number for number in range(10)}
    row.output += [letter, letter, closing[0]]
    words, _ = row.verified(closing[1:-1])
    assert texts_of(vocabulary, words[-1]) == {vocabulary.bytes_of(closing[-1])}
