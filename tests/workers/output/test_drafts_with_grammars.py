"""Rows with a grammar that verify drafts: a mask for each line, and a text that fails by a draft only if it is accepted."""

from pathlib import Path

import numpy as np
import pytest
from byte_vocabulary import apply_plan
from grammar_rows import EOS, VOCAB, allowed, new, of_regex, plan

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.wire.ids import StepId
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output import grammars as of_rows
from meshlm.workers.output.grammars import Grammars
from meshlm.workers.output.matchers import Matchers
from meshlm.workers.rows.step_columns import COMPUTED, Drafts, Mark, StepColumns

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), VOCAB, (EOS,))


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(Matchers(lambda: vocabulary))


def verifying(rows: list[int], drafts: list[list[int]]) -> StepColumns:
    """A step in which these rows verify drafts; a request before them does not sample."""
    batch, ones = np.array([9, *rows], np.int32), np.ones(1 + len(rows), np.int32).tobytes()
    step = StepColumns(StepPlan(1, StepId(1), batch.tobytes(), ones, ones, b"\0" + b"\1" * len(rows), 0))
    tokens = np.array([token for each in drafts for token in each], np.int32)
    step.drafts = Drafts(np.array([len(each) for each in drafts], np.int32), tokens)
    return step


def constraint_of(made: Grammars, step: StepColumns) -> of_rows.Constraint:
    return made.of_step(step.rows[step.places], step)


def test_each_draft_has_a_line(grammars: Grammars, vocabulary: Vocabulary) -> None:
    """Beside rows without a grammar, with drafts or without; a row gets none, some or all of its drafts, and one token more."""
    one, two, letter = (vocabulary.tokens_of(text)[0] for text in (b"1", b"2", b"x"))
    apply_plan(grammars, plan(new(of_regex("[0-9]{3,6}"), 1), new(of_regex("12x"), 2), new(of_regex("1{2}x"), 4)))
    drafts = [[5, 6], [one, two, one], [7], [], [one, letter, one]]
    step = verifying([0, 1, 3, 2, 4], drafts)
    constraint = constraint_of(grammars, step)
    mask = constraint.mask()
    assert mask is not None
    assert mask.lines.tolist() == [3, 4, 5, 6, 9, 10, 11, 12, 13]
    allowed_in = dict(zip(mask.lines.tolist(), mask.allowed(VOCAB), strict=True))
    assert [bool(allowed_in[line][EOS]) for line in (3, 4, 5, 6)] == [False, False, False, True]
    assert [allowed_in[line].sum() for line in (10, 11)] == [1, 1]
    assert allowed_in[12].all()  # a draft that is refused for certain
    assert allowed_in[13].all()
    tokens = np.array([5, one, two, one, EOS, one, one, one], np.int32)
    constraint.after_head(tokens, COMPUTED, np.array([1, 4, 0, 1, 2], np.int32))
    grammars.advance()
    assert [grammars.rows[row].output for row in (1, 2, 4)] == [[one, two, one, EOS], [one], [one, one]]
    assert allowed(grammars, 1) == [EOS]
    assert allowed(grammars, 2) == [two]
    assert allowed(grammars, 4) == [letter]
    assert constraint.findings().failed == {}


def test_drafts_are_read_when_masks_are_made(grammars: Grammars, vocabulary: Vocabulary) -> None:
    """And counts, like tokens, when they are on the host."""
    (digit,) = vocabulary.tokens_of(b"7")
    apply_plan(grammars, plan(new(of_regex("7{5}"))))
    step = verifying([0], [[]])
    constraint = constraint_of(grammars, step)
    step.drafts = Drafts(np.array([2], np.int32), np.array([digit, digit], np.int32))
    mask = constraint.mask(lambda count: np.zeros((count, -(-VOCAB // 32)), np.int32))
    assert mask is not None
    assert mask.lines.tolist() == [0, 1, 2]
    tokens, counts = np.full(3, -1, np.int32), np.array([-1], np.int32)

    class Later(Mark):
        def synchronize(self) -> None:
            tokens[:2], counts[:] = digit, 2

    constraint.after_head(tokens, Later(), counts)
    assert allowed(grammars) == [digit]
    assert grammars.rows[0].output == [digit, digit]


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_a_row_fails_by_a_draft_only_if_it_is_accepted(
    grammars: Grammars, vocabulary: Vocabulary, num_accepted: int
) -> None:
    one, two = (vocabulary.tokens_of(digit)[0] for digit in (b"1", b"2"))
    apply_plan(grammars, plan(new(of_regex("1{2}2|12"), allowed_token_ids=(one,)), new(of_regex("1{9}"), 1)))
    step = verifying([1, 0], [[one], [one, one, two]])
    constraint = constraint_of(grammars, step)
    mask = constraint.mask()
    assert mask is not None
    assert not constraint.failed
    counts = np.array([2, 1 + num_accepted], np.int32)
    constraint.after_head(np.full(counts.sum(), one, np.int32), COMPUTED, counts)
    told = [failed.message for failed in constraint.findings().failed.values()]
    match num_accepted:
        case 0:
            assert not told
            assert allowed(grammars) == [one]
        case 1:  # the token that it lacks is the next step's
            assert not told
            with pytest.raises(AssertionError, match="no token is left"):
                allowed(grammars)
        case 2:
            assert "no token is left" in told[0]
            assert constraint.findings().failed.keys() == {2}
