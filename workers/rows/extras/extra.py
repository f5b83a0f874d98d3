"""What an extra is in a worker: a kind that some rows have, and what a step does for those of its rows that have it.

A kind is a class in a module of this folder, made once for a worker (engine/extra_kinds.py, fake/extras.py). `RowExtras`
(extra.py) asks each kind whether a new row has it, and for a step the kinds that its rows have. No torch.
"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.edges.step import NewRow, RowFailed, StepPlan, StepResult
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.extra_kind import ExtraKind
from meshlm.protocol.extras import find_extra
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import Mark, StepColumns

Found = TypeVar("Found")
States = TypeVar("States")  # of a step's tokens: hidden states in a tensor, or what the fake model has


class MaskTaker(Protocol):
    """The part of a head that takes the masks of rows with a grammar."""

    def take_mask(self, count: int) -> I32: ...

    def mask(self, mask: Any) -> None: ...


class StepFindings(Struct, frozen=True):
    """The findings of an extra in a step, by place in the batch."""

    pooled: dict[int, bytes] = {}
    prompt_logprobs: dict[int, LogprobColumns] = {}
    failed: dict[int, RowFailed] = {}


class StepExtra(Generic[States]):
    """One kind in one step. The engine calls these methods in this order; a kind has those in which it does something."""

    why_no_graph = ""  # why the step is launched kernel by kernel
    reads_across = False  # tokens read what later ones of the step write: it is not halved
    needs_pause = False  # between the model and the head the host has something to do: they are two graphs

    def before_model(self) -> None:
        """The step's rows and columns are on the device."""

    def before_head(self, head: MaskTaker) -> None:
        """The model is launched."""

    def after_model(self, hidden: States) -> None:
        """The states [t, any] of the step's tokens; of a step that is no graph."""

    def after_head(self, tokens: I32, end: Mark, counts: I32 | None = None) -> None:
        """The tokens that rows got [sum(counts)] are on the host behind this mark, and so are `counts` [samples]: how many each
        request that samples got, in the order of StepColumns.places; None: one each."""

    def findings(self) -> StepFindings:
        """Called in the completer thread, when the device has computed the step."""
        return StepFindings()


def with_findings(result: StepResult, extras: Sequence[StepExtra[Any]], origins: I64 | None = None) -> StepResult:
    """The result of a step, and in it what its extras have found. origins: place in the plan of each request of the step, where these
    are others."""
    for extra in extras:
        found = extra.findings()
        result = replace(
            result,
            pooled=result.pooled | _at(found.pooled, origins),
            prompt_logprobs=result.prompt_logprobs | _at(found.prompt_logprobs, origins),
            failed=result.failed | _at(found.failed, origins),
        )
    return result


def _at(found: dict[int, Found], origins: I64 | None) -> dict[int, Found]:
    return found if origins is None else {int(origins[place]): one for place, one in found.items()}


class RowExtra(Generic[States]):
    """One kind. The rows of padding and those of no request have none."""

    extra: type[ExtraKind] | None = None  # of these requests; None: a request has it by its parameters

    def has_row(self, new: NewRow) -> bool:
        return self.extra is not None and find_extra(new.extras, self.extra) is not None

    def prepare(self, extra: ExtraKind) -> RowFailed | None:
        """Does what takes long, before its request gets a row; gives why no row can have it. Called in other threads."""
        return None

    def rewritten(self, new: NewRow) -> NewRow:
        """The row as the table takes it."""
        return new

    def columns_of(self, new: NewRow) -> dict[str, int]:
        """The columns of the row (columns.py) that it decides."""
        return {}

    def add_row(self, new: NewRow) -> None:
        """A request that has it takes a row, which nobody has now."""

    def remove_row(self, row: int) -> None:
        """The row is nobody's any more."""

    def for_step(self, step: StepColumns) -> StepExtra[States] | None:
        """A step some of whose rows have it; None where nothing is to be done for them in this step."""
        return None

    def for_largest_step(self) -> StepExtra[States] | None:
        """The most that it can need beside the model, for the profile of memory."""
        return None

    def drop(self, key: bytes) -> None:
        """No new request will have the extra of this slot_key. Called by the thread that steps."""

    def weights_changed(self) -> None:
        """The model has other weights. Called by the thread that steps."""

    def in_idle_time(self) -> None:
        """There are no requests: a chance to load what the first one would wait for."""

    def weights(self) -> list[Any]:
        """The tensors of the device that sleep and wake with the model's weights."""
        return []

    def sleep(self, *, awake: bool) -> None:
        """Their memory will be gone, until they are awake again. Called by the thread that steps."""


Kind = TypeVar("Kind")


class RowExtras(Generic[States]):
    """Owned by the row table, used by the thread that steps."""

    def __init__(self, kinds: Sequence[RowExtra[States]], num_rows: int) -> None:
        self._kinds = kinds
        self._has = np.zeros((num_rows, len(kinds)), np.bool_)
        self.num_rows = 0  # that have any

    def kind(self, which: type[Kind]) -> Kind:
        (found,) = (kind for kind in self._kinds if isinstance(kind, which))
        return found

    def apply(self, plan: StepPlan) -> list[NewRow]:
        """Rows go and come. Those that come, as the table takes them."""
        if self.num_rows and plan.removed_rows:
            for row in np.frombuffer(plan.removed_rows, np.int32).tolist():
                self._remove_row(row)
        if not plan.new_rows or not self._kinds:
            return plan.new_rows
        return [self._add_row(new) for new in plan.new_rows]

    def _add_row(self, new: NewRow) -> NewRow:
        self._remove_row(new.row)
        kinds = [kind.has_row(new) for kind in self._kinds]
        if not any(kinds):
            return new
        self._has[new.row], self.num_rows = kinds, self.num_rows + 1
        for kind in self._of_row(new.row):
            kind.add_row(new)
        for kind in self._of_row(new.row):
            new = kind.rewritten(new)
        return new

    def columns_of(self, new: NewRow) -> dict[str, int]:
        return {name: value for kind in self._of_row(new.row) for name, value in kind.columns_of(new).items()}

    def _of_row(self, row: int) -> list[RowExtra[States]]:
        return [self._kinds[nth] for nth in np.flatnonzero(self._has[row]).tolist()]

    def _remove_row(self, row: int) -> None:
        for kind in (found := self._of_row(row)):
            kind.remove_row(row)
        self._has[row], self.num_rows = False, self.num_rows - bool(found)

    def reset(self) -> None:
        for row in np.flatnonzero(self._has.any(1)).tolist():
            self._remove_row(row)

    def for_step(self, step: StepColumns) -> list[StepExtra[States]]:
        """Those that the rows of a step have, and that have something to do in it; of none where `num_rows` is 0."""
        kinds = np.flatnonzero(self._has[step.rows].any(0)).tolist()
        return [found for nth in kinds if (found := self._kinds[nth].for_step(step)) is not None]

    def prepare(self, extra: ExtraKind) -> RowFailed | None:
        """Does what takes long of an extra whose request waits for a row; gives why no row can have it. Called in other threads."""
        found = [kind.prepare(extra) for kind in self._kinds if kind.extra is type(extra)]
        return found[0] if found else None

    def drop(self, key: bytes) -> None:
        """No new request will have the extra of this slot_key."""
        for kind in self._kinds:
            kind.drop(key)

    def weights_changed(self) -> None:
        """The model has other weights."""
        for kind in self._kinds:
            kind.weights_changed()

    def for_largest_step(self) -> list[StepExtra[States]]:
        """The most that they may need in a step."""
        return [found for kind in self._kinds if (found := kind.for_largest_step()) is not None]

    def in_idle_time(self) -> None:
        for kind in self._kinds:
            kind.in_idle_time()

    def weights(self) -> list[Any]:
        return [tensor for kind in self._kinds for tensor in kind.weights()]

    def sleep(self, *, awake: bool) -> None:
        for kind in self._kinds:
            kind.sleep(awake=awake)
