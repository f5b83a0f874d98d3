"""What the engine asks of that which drafts and verifies (--speculative-config), on any device. Used by the thread that steps."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.extras.extra import RowExtra
from meshlm.workers.rows.step_columns import StepColumns

if TYPE_CHECKING:
    from meshlm.workers.engine.pending import Outcome, Timeline
    from meshlm.workers.graphs.keys import Key


class Verifier(RowExtra[Any], ABC):
    """All rows have it: it follows how long they are."""

    def has_row(self, new: NewRow) -> bool:
        return True

    @abstractmethod
    def reset(self) -> None:
        """Forget all rows."""

    def forget_graphs(self) -> None:
        """Memory moves to other addresses."""

    @abstractmethod
    def draft(self, step: StepColumns, plan: StepPlan, changes: I32, segments: int) -> tuple[StepColumns, I32, int]:
        """The step as the device computes it, and the changes of its rows that are to be applied with its columns."""

    @abstractmethod
    def place(self, step: StepColumns, key: "Key | None") -> None:
        """The step's columns are on the device, and what changes in its rows. key: of the graph that computes it, if any does."""

    @abstractmethod
    def accept(self, step: StepColumns, sampled: Tensor, hidden: Tensor | None, timeline: "Timeline") -> "Outcome":
        """How many tokens each request keeps. sampled int32 [l]: of the step's lines; hidden [t, hidden]: the last states of its
        tokens, where they are known and this worker samples."""
