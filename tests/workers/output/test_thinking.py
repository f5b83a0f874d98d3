"""The reasoning of a row has no more tokens than its budget: then the closing text comes, and what else the row keeps to begins."""

from pathlib import Path

import numpy as np
import pytest
from byte_vocabulary import apply_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from numpy.typing import NDArray
from tokenizers import AddedToken

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.grammar import Grammar, GrammarKind, ThinkingBudget
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.registry import tool_parser
from meshlm.runtime.parsers.splitter import Splitter
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output.grammars import Grammars
from meshlm.workers.output.matchers import Matchers
from meshlm.workers.output.thinking import MAX_UNSURE, Reasoning
from meshlm.workers.rows.step_columns import COMPUTED

pytestmark = pytest.mark.model
VOCAB, EOS, PROMPT = 49152, 2, [5, 6, 7]


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), VOCAB, (EOS,))


def begun(
    vocabulary: Vocabulary, budget: ThinkingBudget | None, output: list[int], text: str = "", calls: str = ""
) -> Grammars:
    made = Grammars(Matchers(lambda: vocabulary))
    after = "" if not text else "</think>" if budget is None else budget.close
    grammar = Grammar(
        GrammarKind.COMPILED, text, "field", begins_after=after, thinking=budget, calls=calls, tools=("f",)
    )
    tokens = np.array([*PROMPT, *output], np.int32).tobytes()
    row = NewRow(Row(0), tokens, len(PROMPT), b"", SamplingParams(eos_token_ids=(EOS,)), (grammar,))
    apply_plan(made, StepPlan(1, StepId(1), b"", b"", b"", b"", 0, new_rows=[row]))
    return made


def forced(made: Grammars) -> int | None:
    """The only token that may come; None where others may."""
    mask = made.of_step(np.array([0], np.int32)).mask()
    allowed = np.flatnonzero(mask.allowed(VOCAB)[0]) if mask is not None else range(2)
    return int(allowed[0]) if len(allowed) == 1 else None


def push(made: Grammars, token: int) -> None:
    made.of_step(np.array([0], np.int32)).after_head(np.array([token], np.int32), COMPUTED)


def written(vocabulary: Vocabulary, budget: ThinkingBudget, said: str, cut: int | None = None, calls: str = "") -> str:
    """What a row writes whose model says this, where it may; `cut`: it begins anew before this token."""
    wanted, output = vocabulary.tokens_of(said.encode()), list[int]()
    made = begun(vocabulary, budget, [], calls=calls)
    while wanted:
        if len(output) == cut:
            made = begun(vocabulary, budget, output, calls=calls)
        token = forced(made)
        output.append(wanted.pop(0) if token is None else token)
        push(made, output[-1])
    return b"".join(map(vocabulary.bytes_of, output)).decode()


TAGS = ThinkingBudget(2, "</think>", "<think>")


@pytest.mark.parametrize(
    ("budget", "said", "text"),
    [
        (TAGS, " a a a a", " a a</think> a a"),
        (ThinkingBudget(9, "</think>"), " a</think> a a a a a a a a a a", " a</think> a a a a a a a a a a"),
        (TAGS, " a</ a a", " a</think> a a"),  # it was about to end by itself
        (TAGS, "<think> a a a a", "<think> a a</think> a a"),
        (ThinkingBudget(0, "</think>"), " a a", "</think> a a"),
        (ThinkingBudget(2, "[/T]", "[T]", assumed=False), " a a a a", " a a a a"),
        (ThinkingBudget(2, "[/T]", "[T]", assumed=False), "[T] a a a a", "[T] a a[/T] a a"),
        (ThinkingBudget(9, "</think>"), " a a", " a a"),
    ],
)
def test_reasoning_ends_with_its_budget(vocabulary: Vocabulary, budget: ThinkingBudget, said: str, text: str) -> None:
    assert written(vocabulary, budget, said) == text
    for cut in range(1, 12):
        assert written(vocabulary, budget, said, cut) == text


def test_a_constraint_begins_behind_the_forced_end(vocabulary: Vocabulary) -> None:
    made, output = begun(vocabulary, ThinkingBudget(1, "</think>"), [], LLMatcher.grammar_from_regex("x")), list[int]()
    while not output or output[-1] != EOS:
        token = forced(made)
        output.append(vocabulary.tokens_of(b" a")[0] if token is None else token)
        push(made, output[-1])
    assert b"".join(map(vocabulary.bytes_of, output[:-1])) == b" a</think>x"


def test_a_row_whose_reasoning_is_over_has_no_mask(vocabulary: Vocabulary) -> None:
    """So nothing waits for its tokens any more."""
    made = begun(vocabulary, TAGS, vocabulary.tokens_of(b" a</think>"))
    assert forced(made) is None  # its matcher reads the tokens with the next mask
    assert not made.of_step(np.array([0], np.int32))


def test_a_closing_text_that_the_model_has_no_logits_for_is_written_in_other_tokens(smollm2: Path) -> None:
    loaded = tokenizer_files.load(smollm2)
    loaded.tokenizer.add_tokens([AddedToken("</think>")])
    assert loaded.tokenizer.token_to_id("</think>") == VOCAB
    short = Vocabulary(loaded, VOCAB, (EOS,))
    assert written(short, ThinkingBudget(2, "</think>"), " a a a a") == " a a</think> a a"
    assert max(short.tokens_of(b"</think>")) < VOCAB


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "one two three four five"}}\n</tool_call>'


@pytest.mark.parametrize("cut", [None, 1, 4, 7, 12])
@pytest.mark.parametrize(
    ("said", "text"),
    [
        (f" a{CALL} b b b", f" a{CALL} b b b"),  # within the budget, or about to begin behind it
        (f" a a{CALL} b b b", f" a a</think>{CALL} b b b"),
        (" a<tool_call> b b b b", " a<tool_call> b</think> b b b"),  # spoken of
        (' a<tool_call>{"name": 3} b b', ' a<tool_call>{"name": 3</think>} b b'),
    ],
)
def test_no_closing_text_is_forced_into_a_call_that_began_in_the_reasoning(
    vocabulary: Vocabulary, said: str, text: str, cut: int | None
) -> None:
    """The clients are told that a call ends the reasoning, so it has no budget to keep any more."""
    assert written(vocabulary, ThinkingBudget(2, "</think>", "<think>"), said, cut, "hermes") == text


def test_what_may_become_a_call_is_waited_for_only_so_long(vocabulary: Vocabulary) -> None:
    long = " a<tool_call>" + '{"arguments": [' + "1, " * 100
    found = written(vocabulary, ThinkingBudget(2, "</think>"), long, calls="hermes")
    assert found.count("</think>") == 1
    assert len(vocabulary.tokens_of(found[: found.index("</think>")].encode())) <= 2 + MAX_UNSURE + 1


def allowed(made: Grammars) -> NDArray[np.bool_]:
    mask = made.of_step(np.array([0], np.int32)).mask()
    return np.ones(VOCAB, np.bool_) if mask is None else mask.allowed(VOCAB)[0]


@pytest.mark.parametrize(
    ("calls", "said", "may_end"),
    [
        ("", " I think", False),
        ("", f" I think{CALL}", False),
        ("hermes", f" I think{CALL}", True),  # the answer is the call
        ("hermes", " I think", False),
        ("hermes", " of <tool_call>, say", False),
        ("openai", " I think", True),  # channels: a call has its own end
        ("", " I think</think>", False),  # now the constraint says it
        ("", " I think</think>x", True),
    ],
)
def test_an_answer_of_reasoning_alone_cannot_end_where_a_constraint_follows(
    vocabulary: Vocabulary, calls: str, said: str, *, may_end: bool
) -> None:
    output = vocabulary.tokens_of(said.encode())
    made = begun(vocabulary, None, output, LLMatcher.grammar_from_regex("x"), calls)
    found = allowed(made)
    assert bool(found[EOS]) is may_end
    assert found.any()


def test_reasoning_may_end_where_what_follows_may_be_nothing(vocabulary: Vocabulary) -> None:
    """As behind it with tools that may be called, but need not be."""
    made = begun(vocabulary, None, vocabulary.tokens_of(b" a"), LLMatcher.grammar_from_regex("x*"))
    assert allowed(made)[EOS]


def test_reasoning_without_a_constraint_may_end(vocabulary: Vocabulary) -> None:
    assert allowed(begun(vocabulary, ThinkingBudget(9, "</think>"), vocabulary.tokens_of(b" a")))[EOS]


def test_a_character_that_begins_in_the_token_of_the_closing_text_is_the_constraints(vocabulary: Vocabulary) -> None:
    """A token may be some bytes of a character: none is lost where the reasoning ends."""
    made = begun(vocabulary, None, [], LLMatcher.grammar_from_regex("é"))
    first, second = (vocabulary.tokens_of(bytes([byte]))[0] for byte in "é".encode())
    for token in (*vocabulary.tokens_of("ß</think>".encode()), first):
        push(made, token)
    assert np.flatnonzero(allowed(made)).tolist() == [second]


WORDS = [*CALL.replace("<", " <").split(" "), "</think>", "<think>", "<tool_call>", "a", "</", "{", '"name": "f"', CALL]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=9), st.sampled_from(["", "hermes", "qwen3_coder"]))
def test_workers_and_frontends_see_the_same_end(vocabulary: Vocabulary, words: list[str], calls: str) -> None:
    text = "".join(words)
    parser = tool_parser(calls) if calls else None
    budget = ThinkingBudget(1000, "</think>", "<think>")
    ours, theirs = (
        Reasoning(Grammar(GrammarKind.FREE, thinking=budget, calls=calls), vocabulary),
        Splitter(ReasoningParser(), parser),
    )
    for token in vocabulary.tokens_of(text.encode()):
        ours.push(token)
        theirs.push(vocabulary.bytes_of(token).decode())
        assert ours.is_over is theirs.is_over
