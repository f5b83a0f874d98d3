"""The persistent batch rows: a plan brings only what changed, and all else is here. No torch: the fake worker has the same table.

All rows are in one array of int32, on the device or (fake) in numpy: their tokens, a block table for each group of layers, and their
columns (columns.py). This table knows where each of these begins, and makes the changes of a plan. Owned by the thread that steps.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.workers.rows.changes import I32, I64, NOTHING, Changes
from meshlm.workers.rows.columns import ON_DEVICE, RowColumns, num_ints
from meshlm.workers.rows.extras.extra import RowExtras

ALIGN = 16  # ints; Triton compiles another variant for pointers that are less aligned


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


class Region(NamedTuple):
    begin: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape)


class RowTable:
    """Row `max_rows` is the dummy of padding.

    A page of a group of which several layers share a tensor (`shares` by group) is so many virtual pages, and the block table names the
    first. The block tables of a row grow together."""

    def __init__(
        self, max_rows: int, max_model_len: int, block_size: int, num_groups: int = 1, shares: tuple[int, ...] = ()
    ) -> None:
        self.max_rows, self.block_size, self.num_groups = max_rows, block_size, num_groups
        self.num_rows = rows = max_rows + 1
        self.width, self.table_width = aligned(max_model_len + 1), aligned(-(-max_model_len // block_size))
        self._shares = np.array(shares or (1,) * num_groups, np.int32)
        self.tokens = Region(0, (rows, self.width))
        self.block_tables = Region(rows * self.width, (num_groups, rows, self.table_width))
        self._table_at = self.block_tables.begin + np.arange(num_groups) * rows * self.table_width
        self._column_ints = np.array([num_ints(column) for column in ON_DEVICE])
        sizes = -(-rows * self._column_ints // ALIGN) * ALIGN
        ends = self.block_tables.end + np.cumsum(sizes)
        self.columns_at: I64 = ends - sizes
        self.num_ints = int(ends[-1])
        self.columns = RowColumns(rows)
        self.extras: RowExtras[Any] = RowExtras((), rows)  # the engine says which kinds there are
        self._num_blocks = np.zeros(rows, np.int64)

    def changes(self, plan: StepPlan) -> tuple[I32, int]:
        """The changes that a plan makes, as changes.py packs them, and their number of segments."""
        new_rows = self.extras.apply(plan)
        if not (new_rows or plan.block_rows or plan.input_ids):
            return NOTHING, 0
        changes = Changes()
        for new in new_rows:
            self._add_row(new, changes)
        if plan.block_rows:
            rows = np.frombuffer(plan.block_rows, np.int32)
            changes.singles(self._appended(rows), self.pages(plan.block_ids).ravel())
        if plan.input_ids:  # a pipeline: the last stage sampled them
            ids = np.frombuffer(plan.input_ids, np.int32)
            rows, starts = (np.frombuffer(column, np.int32)[: len(ids)] for column in (plan.rows, plan.starts))
            changes.singles(rows.astype(np.int64) * self.width + starts, ids)
        return changes.packed()

    def pages(self, block_ids: bytes) -> I32:
        """int32 [blocks, groups]: what block tables name."""
        found: I32 = np.frombuffer(block_ids, np.int32).reshape(-1, self.num_groups) * self._shares
        return found

    def _add_row(self, new: NewRow, changes: Changes) -> None:
        row, blocks = new.row, self.pages(new.block_ids)
        of_plan = {"num_prompt_tokens": new.num_prompt_tokens, "num_known": len(new.token_ids) // 4}
        self.columns.set(row, new.sampling, **of_plan, **self.extras.columns_of(new))
        self._num_blocks[row] = len(blocks)
        changes.run(row * self.width, np.frombuffer(new.token_ids, np.int32))
        tables = self._table_at + row * self.table_width
        changes.runs(tables, np.full(self.num_groups, len(blocks)), blocks.T.ravel())
        changes.runs(self.columns_at + row * self._column_ints, self._column_ints, self.columns.ints(row))

    def _appended(self, rows: I32) -> I64:
        """Places of new blocks, in each group. A row may get several, in order, with other rows' between them."""
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        lengths = np.diff(np.append(first, len(rows)))
        nth = np.empty(len(rows), np.int64)
        nth[order] = np.arange(len(rows)) - np.repeat(first, lengths)
        within = rows.astype(np.int64) * self.table_width + self._num_blocks[rows] + nth
        self._num_blocks[ordered[first]] += lengths
        places: I64 = (within[:, None] + self._table_at).ravel()
        return places

    def reset(self) -> None:
        """Forget all requests: rows are taken anew."""
        self.extras.reset()
        self.columns.reset()
