"""Rows that want something of their prompt: a vector, or the log-probabilities of its tokens. No torch: what finds them is given
(output/pooler.py, output/logprobs.py, fake/extras.py).
"""

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


class PromptSpan(NamedTuple):
    """The tokens of a step that prompt tokens follow whose log-probabilities are wanted."""

    place: int  # in the batch
    row: int
    begin: int  # the first of them in the step
    position: int  # of the first that follows
    num_tokens: int
    width: int


class PromptLogprobsRows(RowExtra[States]):
    def __init__(self, columns: RowColumns, step_of: Callable[[list[PromptSpan]], StepExtra[States]]) -> None:
        """step_of: finds them for the rows of a step."""
        self._columns, self._step_of = columns, step_of

    def has_row(self, new: NewRow) -> bool:
        return new.sampling.prompt_logprobs >= 0

    def for_step(self, step: StepColumns) -> StepExtra[States] | None:
        """The decodes behind a prompt need nothing, and stay in their CUDA graph."""
        wanted = self._columns.prompts_with_logprobs(step.rows, step.starts).tolist()
        if not wanted:
            return None
        begins, found = np.cumsum(step.counts) - step.counts, []
        for place in wanted:
            row, start = int(step.rows[place]), int(step.starts[place])
            last = min(start + int(step.counts[place]), int(self._columns["num_prompt_tokens"][row]) - 1)
            width = int(self._columns["prompt_logprobs"][row])
            found.append(PromptSpan(place, row, int(begins[place]), start + 1, last - start, width))
        return self._step_of(found)
