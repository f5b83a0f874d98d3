"""Rows that want the log-probabilities of their prompt's tokens. No torch: what finds them is given."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshlm.protocol.edges.step import NewRow
from meshlm.workers.rows.columns import RowColumns
from meshlm.workers.rows.extras.extra import RowExtra, States, StepExtra
from meshlm.workers.rows.step_columns import StepColumns


class PromptSpan(NamedTuple):
    """The tokens of a step that prompt tokens follow whose log-probabilities are wanted."""

    place: int  # in the batch
    row: int
    begin: int  # the first of them in the step
    position: int  # of the first that follows
    num_tokens: int
    width: int


class PromptLogprobsRows(RowExtra[States]):
    """See `RowExtra`."""

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
