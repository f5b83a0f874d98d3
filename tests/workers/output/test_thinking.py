"""The reasoning of a row has no more tokens than its budget: then the closing text comes, and what else the row keeps to begins."""

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from meshlm.protocol.grammar import Grammar, GrammarKind, ThinkingBudget
from meshlm.protocol.ids import Row, StepId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import NewRow, StepPlan
from meshlm.runtime import tokenizer_files
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output.grammars import COMPUTED, Grammars

pytestmark = pytest.mark.model
VOCAB, EOS, PROMPT = 49152, 2, [5, 6, 7]


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), VOCAB, (EOS,))


def begun(vocabulary: Vocabulary, budget: ThinkingBudget, output: list[int], text: str = "") -> Grammars:
    made = Grammars(lambda: vocabulary)
    after = budget.close if text else ""
    grammar = Grammar(GrammarKind.COMPILED, text, "field", begins_after=after, thinking=budget)
    tokens = np.array([*PROMPT, *output], np.int32).tobytes()
    row = NewRow(Row(0), tokens, len(PROMPT), b"", SamplingParams(grammar=grammar, eos_token_ids=(EOS,)))
    made.apply(StepPlan(1, StepId(1), b"", b"", b"", b"", 0, new_rows=[row]))
    return made


def forced(made: Grammars) -> int | None:
    """The only token that may come; None where others may."""
    mask = made.of_step(np.array([0], np.int32)).mask()
    allowed = np.flatnonzero(mask.allowed(VOCAB)[0]) if mask is not None else range(2)
    return int(allowed[0]) if len(allowed) == 1 else None


def push(made: Grammars, token: int) -> None:
    made.of_step(np.array([0], np.int32)).sampled(np.array([token], np.int32), COMPUTED)


def written(vocabulary: Vocabulary, budget: ThinkingBudget, said: str, cut: int | None = None) -> str:
    """What a row writes whose model says this, where it may; `cut`: it begins anew before this token."""
    wanted, output = vocabulary.tokens_of(said.encode()), list[int]()
    made = begun(vocabulary, budget, [])
    while wanted:
        if len(output) == cut:
            made = begun(vocabulary, budget, output)
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
    assert not made.of_step(np.array([0], np.int32))


def test_a_closing_text_that_the_model_has_no_logits_for_is_written_in_other_tokens(smollm2: Path) -> None:
    loaded = tokenizer_files.load(smollm2)
    loaded.tokenizer.add_tokens([AddedToken("</think>")])
    assert loaded.tokenizer.token_to_id("</think>") == VOCAB
    short = Vocabulary(loaded, VOCAB, (EOS,))
    assert written(short, ThinkingBudget(2, "</think>"), " a a a a") == " a a</think> a a"
    assert max(short.tokens_of(b"</think>")) < VOCAB
