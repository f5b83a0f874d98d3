"""The persistent batch rows: a plan brings only what changed, this table has the rest. No torch.

Owned by the thread that steps. `step` turns a plan's columns into flat per-token arrays without a Python loop over requests.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.tasks import Pool, PoolKind

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


class StepArrays(NamedTuple):
    """One step, host side. n requests, t tokens."""

    rows: I32  # [n]
    starts: I32  # [n] first position computed
    counts: I32  # [n] positions computed
    samples: NDArray[np.bool_]  # [n]
    query_start: I32  # [n + 1] prefix sum of counts
    token_rows: I32  # [t] row of each token
    positions: I64  # [t]
    slots: I64  # [t, groups] block * block_size + offset
    token_ids: I32  # [t]; -1 where the id is the row's last sampled token, known only on the device


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


class RowTable:
    """Rows by number; all arrays have max_rows rows."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size, self.num_groups = block_size, num_groups
        self.max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((max_rows, max_model_len + 1), np.int32)
        self.num_known = np.zeros(max_rows, np.int32)  # leading tokens whose ids are in `tokens`
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.blocks = np.zeros((max_rows, self.max_blocks, num_groups), np.int32)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.sampling: dict[int, SamplingParams] = {}
        self.pools: dict[int, Pool] = {}  # rows that want a vector

    def reset(self) -> None:
        """Forget all rows."""
        self.sampling.clear()
        self.pools.clear()
        self.num_known[:] = 0
        self.num_blocks[:] = 0

    def apply(self, plan: StepPlan) -> None:
        """Rows that go, rows that come, blocks that are appended."""
        for row in np.frombuffer(plan.removed_rows, np.int32).tolist():
            self.sampling.pop(row, None)
            self.pools.pop(row, None)
        for new in plan.new_rows:
            self._take(new)
        if plan.block_rows:
            ids = np.frombuffer(plan.block_ids, np.int32).reshape(-1, self.num_groups)
            self._append(np.frombuffer(plan.block_rows, np.int32), ids)
        if plan.input_ids:
            ids = np.frombuffer(plan.input_ids, np.int32)
            rows, at = np.frombuffer(plan.rows, np.int32)[: len(ids)], np.frombuffer(plan.starts, np.int32)[: len(ids)]
            self.tokens[rows, at] = ids
            self.num_known[rows] = at + 1

    def _take(self, new: NewRow) -> None:
        ids = np.frombuffer(new.token_ids, np.int32)
        blocks = np.frombuffer(new.block_ids, np.int32).reshape(-1, self.num_groups)
        row = new.row
        self.tokens[row, : len(ids)] = ids
        self.num_known[row] = len(ids)
        self.num_prompt[row] = new.num_prompt_tokens
        self.blocks[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.sampling[row] = new.sampling
        if isinstance(new.task, Pool):
            self.pools[row] = new.task

    def _append(self, rows: I32, ids: I32) -> None:
        """A row may get several blocks; its pairs stand together and in order."""
        first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        lengths = np.diff(np.append(first, len(rows)))
        nth = np.arange(len(rows)) - np.repeat(first, lengths)
        self.blocks[rows, self.num_blocks[rows] + nth] = ids
        self.num_blocks[rows[first]] += lengths.astype(np.int32)

    def step(self, plan: StepPlan) -> StepArrays:
        """The plan's columns as flat arrays; call after `apply`."""
        rows, starts = np.frombuffer(plan.rows, np.int32), np.frombuffer(plan.starts, np.int32)
        n = len(rows)
        counts = np.frombuffer(plan.counts, np.int32) if plan.counts else np.ones(n, np.int32)
        samples = np.frombuffer(plan.samples, np.uint8).astype(np.bool_) if plan.samples else np.ones(n, np.bool_)
        query_start = np.zeros(n + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        if plan.num_tokens == n:
            token_rows, positions = rows, starts.astype(np.int64)
        else:
            token_rows = np.repeat(rows, counts)
            within = np.arange(plan.num_tokens) - np.repeat(query_start[:-1], counts)
            positions = np.repeat(starts, counts).astype(np.int64) + within
        slots = self.slots(token_rows, positions)
        known = positions < self.num_known[token_rows]
        token_ids = np.where(known, self.tokens[token_rows, positions], np.int32(-1))
        return StepArrays(rows, starts, counts, samples, query_start, token_rows, positions, slots, token_ids)

    def pooling(self, arrays: StepArrays) -> list[Pooling]:
        """See `pooling`."""
        return pooling(self.pools, arrays.rows, arrays.starts, arrays.counts, self.num_prompt)

    def slots(self, rows: NDArray[Any], positions: I64) -> I64:
        """The slots in which each group has these positions: an array of their common shape, and [groups] behind."""
        blocks = self.blocks[rows, positions // self.block_size].astype(np.int64)
        found: I64 = blocks * self.block_size + (positions % self.block_size)[..., None]
        return found

    def sampled(self, arrays: StepArrays, token_ids: I32) -> None:
        """The tokens of the rows that sampled are known now (a device that computes in step)."""
        rows = arrays.rows[arrays.samples]
        at = (arrays.starts + arrays.counts)[arrays.samples]
        self.tokens[rows, at] = token_ids
        self.num_known[rows] = at + 1
