"""What a drafter is: something that guesses the tokens that follow each row's known ones.

An engine has one at the most, which it calls before a step. The step computes the guesses together with the known token, and keeps
those that equal its own samples (protocol/edges/step.py).
"""

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from meshlm.protocol.edges.step import NewRow
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns


class Drafts(NamedTuple):
    """The tokens that are guessed for n rows."""

    tokens: I32  # [n, k]: row i's are the first counts[i]; what stands behind them means nothing
    counts: I32  # [n]: 0 .. k


class Drafter(Protocol):
    """It is made with `tokens`, int32 [rows, width] on the host: a view of all rows' tokens, prompt and output. It reads a row's known
    ones alone, which do not change while the row is held. Called by the engine's thread.

    The ranks of a group draft alike: the same calls give the same drafts, whatever the process, its hash seed and its clock."""

    def reset(self) -> None:
        """Forget all rows, and what was learned from earlier ones: a session begins, for all ranks alike."""

    def add_row(self, new: NewRow) -> None:
        """A request takes a row that is free: new, or resumed after preemption. Its tokens need not stand in `tokens` yet."""

    def remove_row(self, row: int, num_known: int) -> None:
        """A request leaves its row, of which so many tokens are known. They still stand in `tokens`."""

    def computed(self, step: StepColumns, counts: I32, hidden: Tensor) -> None:
        """A step is computed, with drafts; counts [samples]: of the tokens that each request that samples got; hidden [t, hidden]: the
        model's last states of the step's tokens. On the stages of a pipeline it is called before, with the most tokens that requests
        may get, and no states."""

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        """rows [n], each once and held; lens [n]: known tokens of each; most [n]: the most drafts that it may have. A row gets as many
        as there is a good guess for: often none."""


def no_drafts(most: I32) -> Drafts:
    """Drafts to be filled: room for most[i] tokens of each row, none there yet."""
    return Drafts(np.zeros((len(most), int(most.max(initial=0))), np.int32), np.zeros(len(most), np.int32))
