"""The persistent rows on the GPU: all tokens, block tables and sampling columns in one int32 tensor.

A plan's changes become segments of one host buffer that is copied once and scattered by one kernel. Padding requests of CUDA graphs
use the row after the last. Owned by the stepper thread.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.penalties.kernel import Edits, Penalties
from meshlm.kernels.sample.kernel import Rows
from meshlm.kernels.truncate.kernel import Limits
from meshlm.protocol.step_edge import NewRow, StepPlan
from meshlm.workers.sampling.table import EDITS, edits

I32 = NDArray[np.int32]
ALIGN = 16  # ints; Triton compiles another variant for pointers that are less aligned


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


class DeviceRows:
    """Row `max_rows` is the dummy of padding."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        rows = max_rows + 1
        self.max_rows, self.block_size = max_rows, block_size
        self._width = aligned(max_model_len + 1)
        self._table = aligned(-(-max_model_len // block_size))
        each = aligned(rows)
        sizes = [rows * self._width, rows * self._table, aligned(2 * rows)] + 9 * [each] + 3 * [rows * EDITS]
        self._tokens_at, self._blocks_at, self._seeds_at, self._prompts_at, *columns = (
            int(at) for at in np.cumsum([0, *sizes[:-1]])
        )
        self._heat_at, self._min_p_at, self._top_k_at, self._top_p_at = columns[:4]
        self._penalties_at, self._num_edits_at, self._edits_at = columns[4:7], columns[7], columns[8:]
        self.state = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.tokens = self.state[: sizes[0]].view(rows, self._width)
        self.blocks = self.state[self._blocks_at : self._seeds_at].view(rows, self._table)
        heat, min_p, top_k, top_p, *penalties, num_edits = (self.state[at : at + rows] for at in columns[:8])
        ids, adds, untils = (self.state[at : at + rows * EDITS].view(rows, EDITS) for at in self._edits_at)
        self.sampling = Rows(
            heat.view(torch.float32),
            self.state[self._seeds_at : self._seeds_at + 2 * rows].view(rows, 2),
            self.state[self._prompts_at : self._prompts_at + rows],
            self.tokens,
        )
        self.limits = Limits(heat.view(torch.float32), min_p.view(torch.float32), top_k, top_p.view(torch.float32))
        self.penalties = Penalties(*(column.view(torch.float32) for column in penalties))
        self.penalties.repetition.fill_(1.0)
        self.edits = Edits(num_edits, ids, adds.view(torch.float32), untils)
        self.num_prompt = np.zeros(rows, np.int64)
        self._num_blocks = np.zeros(rows, np.int64)

    def changes(self, plan: StepPlan) -> tuple[I32, int]:
        """The buffer for kernels/step_input's `scatter`, and its number of segments."""
        segments: list[tuple[int, int, int]] = []
        data: list[I32] = []
        size = 0

        def add(place: int, values: I32) -> None:
            nonlocal size
            segments.append((place, size, len(values)))
            data.append(values)
            size += len(values)

        for new in plan.new_rows:
            self._take(new, add)
        triples = np.array(segments, np.int32).reshape(-1, 3)
        if plan.block_rows:
            rows = np.frombuffer(plan.block_rows, np.int32)
            places = self._appended(rows)
            more = np.empty((len(rows), 3), np.int32)
            more[:, 0], more[:, 1], more[:, 2] = places, np.arange(size, size + len(rows)), 1
            triples = np.concatenate((triples, more))
            data.append(np.frombuffer(plan.block_ids, np.int32))
            size += len(rows)
        if plan.input_ids:  # a pipeline: the last stage sampled them
            ids = np.frombuffer(plan.input_ids, np.int32)
            rows, at = np.frombuffer(plan.rows, np.int32)[: len(ids)], np.frombuffer(plan.starts, np.int32)[: len(ids)]
            more = np.empty((len(ids), 3), np.int32)
            more[:, 0], more[:, 1], more[:, 2] = (
                self._tokens_at + rows * self._width + at,
                np.arange(len(ids)) + size,
                1,
            )
            size += len(ids)
            triples = np.concatenate((triples, more))
            data.append(ids)
        if not len(triples):
            return np.empty(0, np.int32), 0
        return np.concatenate((triples.ravel(), *data)), len(triples)

    def _take(self, new: NewRow, add: "object") -> None:
        assert callable(add)
        row, sampling = new.row, new.sampling
        blocks = np.frombuffer(new.block_ids, np.int32)
        self.num_prompt[row] = new.num_prompt_tokens
        self._num_blocks[row] = len(blocks)
        add(self._tokens_at + row * self._width, np.frombuffer(new.token_ids, np.int32))
        add(self._blocks_at + row * self._table, blocks)
        add(self._heat_at + row, np.array([sampling.temperature], np.float32).view(np.int32))
        add(self._min_p_at + row, np.array([sampling.min_p], np.float32).view(np.int32))
        add(self._top_k_at + row, np.array([max(0, sampling.top_k)], np.int32))
        add(self._top_p_at + row, np.array([sampling.top_p], np.float32).view(np.int32))
        add(self._seeds_at + 2 * row, np.array([sampling.seed], np.uint64).view(np.int32))
        add(self._prompts_at + row, np.array([new.num_prompt_tokens], np.int32))
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        for at, value in zip(self._penalties_at, penalties, strict=True):
            add(at + row, np.array([value], np.float32).view(np.int32))
        found = edits(sampling) or []
        add(self._num_edits_at + row, np.array([len(found)], np.int32))
        if found:
            ids, adds, untils = zip(*found, strict=True)
            columns = (np.array(ids, np.int32), np.array(adds, np.float32).view(np.int32), np.array(untils, np.int32))
            for at, column in zip(self._edits_at, columns, strict=True):
                add(at + row * EDITS, column)

    def _appended(self, rows: I32) -> NDArray[np.int64]:
        """Places of new blocks. A row may get several; its pairs stand together and in order."""
        first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        lengths = np.diff(np.append(first, len(rows)))
        nth = np.arange(len(rows)) - np.repeat(first, lengths)
        places: NDArray[np.int64] = self._blocks_at + rows.astype(np.int64) * self._table + self._num_blocks[rows] + nth
        self._num_blocks[rows[first]] += lengths
        return places


class Staging:
    """Host buffers on their way to the GPU: pinned, in a ring, none reused before its copy is done."""

    def __init__(self, ints: int, device: torch.device, depth: int = 8) -> None:
        self._device = device
        self._slots = [torch.empty(ints, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def send(self, values: I32, to: Tensor) -> None:
        """Queue the copy of `values` into the beginning of `to`."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        event = self._events[slot]
        if event is not None:
            event.synchronize()  # long past, unless the host is a whole ring ahead
        if len(values) > self._slots[slot].numel():
            self._slots[slot] = torch.empty(2 * len(values), dtype=torch.int32, pin_memory=True)
        pinned = self._slots[slot][: len(values)]
        pinned.numpy()[:] = values
        to[: len(values)].copy_(pinned, non_blocking=True)
        make: Any = torch.cuda.Event  # typed in some versions of torch only
        event = event or make()
        assert event is not None
        event.record()
        self._events[slot] = event
