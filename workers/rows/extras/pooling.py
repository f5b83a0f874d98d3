"""Rows that want a vector of their prompt. No torch: what makes the vectors is given (output/pooler.py, fake/pooling.py)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.extras import find_extra
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.workers.rows.columns import RowColumns
from meshlm.workers.rows.extras.extra import RowExtra, States, StepExtra
from meshlm.workers.rows.step_columns import StepColumns


class Pooling(NamedTuple):
    """A row of a step that wants a vector."""

    place: int  # in the batch
    row: int
    task: Pool
    begin: int  # its tokens in the step's flat arrays
    end: int
    start: int  # the position of the first of them
    num_prompt: int

    @property
    def kind(self) -> PoolKind:
        return self.task.kind

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """The prompt is computed with this step."""
        return self.start + self.end - self.begin == self.num_prompt

    @property
    def takes_states(self) -> bool:
        """Whether this step's hidden states are part of the vector, or the step gives it."""
        return (
            self.is_last
            or self.kind in (PoolKind.MEAN, PoolKind.ALL, PoolKind.SPLADE)
            or (self.kind is PoolKind.CLS and self.is_first)
        )


class PoolingRows(RowExtra[States]):
    """See `RowExtra`."""

    extra = Pool

    def __init__(self, columns: RowColumns, pooled_step: Callable[[list[Pooling]], StepExtra[States] | None]) -> None:
        """pooled_step: makes the vectors of the rows of a step."""
        self._columns, self._pooled_step = columns, pooled_step
        self._tasks: dict[int, Pool] = {}

    def columns_of(self, new: NewRow) -> dict[str, int]:
        return {"second_from": self._tasks[new.row].second_from}

    def add_row(self, new: NewRow) -> None:
        task = find_extra(new.extras, Pool)
        assert task is not None
        self._tasks[new.row] = task

    def remove_row(self, row: int) -> None:
        del self._tasks[row]

    def for_step(self, step: StepColumns) -> StepExtra[States] | None:
        ends, num_prompt = np.cumsum(step.counts), self._columns["num_prompt_tokens"]
        found = []
        for place, row in enumerate(step.rows.tolist()):
            if (task := self._tasks.get(row)) is not None:
                end, count = int(ends[place]), int(step.counts[place])
                found.append(Pooling(place, row, task, end - count, end, int(step.starts[place]), int(num_prompt[row])))
        return self._pooled_step(found)
