"""The rows of the fake worker: the table's array in numpy, and which tokens are known.

Owned by the thread that steps. `step` turns a plan's columns into flat per-token arrays without a Python loop over requests.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.edges.step import StepPlan
from meshlm.workers.rows.changes import I32, I64, unpacked
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.rows.table import RowTable


class StepArrays(NamedTuple):
    """One step, host side. n requests, t tokens."""

    rows: I32  # [n]
    starts: I32  # [n] first position computed
    counts: I32  # [n] positions computed
    samples: NDArray[np.bool_]  # [n]
    query_start: I32  # [n + 1] prefix sum of counts
    slots: I64  # [t, groups] block * block_size + offset
    token_ids: I32  # [t]; -1 where nobody knows it yet


class FakeRows:
    """`tokens` [rows, length] and `blocks` [groups, rows, blocks] are views of the table's array."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.table = table = RowTable(max_rows, max_model_len, block_size, num_groups)
        self._state = np.zeros(table.num_ints, np.int32)
        self.tokens, self.blocks = (
            self._state[region.begin : region.end].reshape(region.shape)
            for region in (table.tokens, table.block_tables)
        )
        self.num_known = np.zeros(table.num_rows, np.int32)  # leading tokens of each row that are known

    def apply(self, plan: StepPlan) -> None:
        """Rows that come, blocks that are appended."""
        changes, segments = self.table.changes(plan)
        if segments:
            places, values = unpacked(changes, segments)
            self._state[places] = values
        for new in plan.new_rows:
            self.num_known[new.row] = len(new.token_ids) // 4
        if plan.input_ids:
            count = len(plan.input_ids) // 4
            self.num_known[np.frombuffer(plan.rows, np.int32)[:count]] = (
                np.frombuffer(plan.starts, np.int32)[:count] + 1
            )

    def step(self, step: StepColumns) -> StepArrays:
        """A step's columns as flat arrays; call after `apply`."""
        rows, starts, counts = step.rows, step.starts, step.counts
        samples = np.ones(step.n, np.bool_) if step.samples is None else step.samples
        query_start = np.zeros(step.n + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        token_rows, positions = step.of_tokens()
        slots = self.slots(token_rows, positions)
        token_ids = np.where(positions < self.num_known[token_rows], self.tokens[token_rows, positions], np.int32(-1))
        return StepArrays(rows, starts, counts, samples, query_start, slots, token_ids)

    def slots(self, rows: NDArray[Any], positions: I64) -> I64:
        """The slots in which each group has these positions: an array of their common shape, and [groups] behind."""
        size = self.table.block_size
        blocks = np.moveaxis(self.blocks[:, rows, positions // size], 0, -1).astype(np.int64)
        found: I64 = blocks * size + (positions % size)[..., None]
        return found

    def sampled(self, arrays: StepArrays, token_ids: I32) -> None:
        """The tokens of the rows that sampled are known now (a device that computes in step)."""
        rows = arrays.rows[arrays.samples]
        at = (arrays.starts + arrays.counts)[arrays.samples]
        self.tokens[rows, at] = token_ids
        self.num_known[rows] = at + 1
