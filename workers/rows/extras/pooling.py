"""The rows of a step that want a vector. No torch: the fake worker's, too."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.tasks import Pool, PoolKind
from meshlm.workers.rows.changes import I32


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


def pooling(tasks: dict[int, Pool], rows: I32, starts: I32, counts: I32, num_prompt: NDArray[Any]) -> list[Pooling]:
    """The rows of a step that want a vector; few steps have any. tasks: by row, of all rows that want one."""
    if not tasks:
        return []
    ends = np.cumsum(counts)
    found = []
    for place, row in enumerate(rows.tolist()):
        if (task := tasks.get(row)) is not None:
            end, count = int(ends[place]), int(counts[place])
            found.append(Pooling(place, row, task, end - count, end, int(starts[place]), int(num_prompt[row])))
    return found
