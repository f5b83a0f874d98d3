"""Rows with grammars of SmolLM2's vocabulary: what comes, what may come next, and what is sampled."""

from typing import Any

import numpy as np
from llguidance import LLMatcher

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.output.grammars import Grammars
from meshlm.workers.rows.step_columns import COMPUTED

VOCAB, EOS = 49152 + 8, 2  # eight lines of logits without a token
PROMPT = [5, 6, 7]


def of_regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def new(
    text: str, row: int = 0, output: tuple[int, ...] = (), after: str = "", eos: int = EOS, **params: Any
) -> NewRow:
    grammar = Grammar(GrammarKind.COMPILED, text, "field", begins_after=after)
    tokens = np.array([*PROMPT, *output], np.int32).tobytes()
    sampling = SamplingParams(eos_token_ids=(eos,), **params)
    return NewRow(Row(row), tokens, len(PROMPT), b"", sampling, (grammar,))


def plan(*news: NewRow, removed: tuple[int, ...] = ()) -> StepPlan:
    gone = np.array(removed, np.int32).tobytes()
    return StepPlan(1, StepId(1), b"", b"", b"", b"", 0, removed_rows=gone, new_rows=list(news))


def allowed(made: Grammars, row: int = 0) -> list[int]:
    return allowed_of(made, VOCAB, row)


def allowed_of(made: Grammars, vocab_size: int, row: int = 0) -> list[int]:
    """The tokens that may come next; AssertionError where its text cannot go on."""
    constraint = made.of_step(np.array([row], np.int32))
    mask = constraint.mask()
    assert mask is not None
    assert not constraint.failed, constraint.failed
    return np.flatnonzero(mask.allowed(vocab_size)[0]).tolist()


def push(made: Grammars, token: int, row: int = 0) -> None:
    made.of_step(np.array([row], np.int32)).after_head(np.array([token], np.int32), COMPUTED)
