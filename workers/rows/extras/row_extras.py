"""Which rows have which extras. A step is asked for its extras while any row has some."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from meshlm.protocol.edges.step import NewRow, RowFailed, StepPlan
from meshlm.protocol.extra_kind import ExtraKind
from meshlm.workers.rows.extras.extra import RowExtra, States, StepExtra
from meshlm.workers.rows.step_columns import StepColumns

Kind = TypeVar("Kind")


class RowExtras(Generic[States]):
    """Owned by the row table, used by the thread that steps."""

    def __init__(self, kinds: Sequence[RowExtra[States]], num_rows: int) -> None:
        self._kinds = kinds
        self._has = np.zeros((num_rows, len(kinds)), np.bool_)
        self.num_rows = 0  # that have any

    def kind(self, which: type[Kind]) -> Kind:
        """The kind of this class."""
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
        """The columns of a row that its extras decide."""
        return {name: value for kind in self._of_row(new.row) for name, value in kind.columns_of(new).items()}

    def _of_row(self, row: int) -> list[RowExtra[States]]:
        return [self._kinds[nth] for nth in np.flatnonzero(self._has[row]).tolist()]

    def _remove_row(self, row: int) -> None:
        for kind in (found := self._of_row(row)):
            kind.remove_row(row)
        self._has[row], self.num_rows = False, self.num_rows - bool(found)

    def reset(self) -> None:
        """All rows are nobody's."""
        for row in np.flatnonzero(self._has.any(1)).tolist():
            self._remove_row(row)

    def for_step(self, step: StepColumns) -> list[StepExtra[States]]:
        """Those that the rows of a step have, and that have something to do in it; of none where `num_rows` is 0."""
        kinds = np.flatnonzero(self._has[step.rows].any(0)).tolist()
        return [found for nth in kinds if (found := self._kinds[nth].for_step(step)) is not None]

    def prepare(self, extra: ExtraKind) -> RowFailed | None:
        """What takes long of an extra whose request waits for a row; why no row can have it. Called in other threads."""
        found = [kind.prepare(extra) for kind in self._kinds if kind.extra is type(extra)]
        return found[0] if found else None

    def for_largest_step(self) -> list[StepExtra[States]]:
        """The most that they may need in a step."""
        return [found for kind in self._kinds if (found := kind.for_largest_step()) is not None]

    def in_idle_time(self) -> None:
        for kind in self._kinds:
            kind.in_idle_time()
