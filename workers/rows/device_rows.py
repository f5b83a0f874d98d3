"""The persistent rows on the device, GPU or CPU: all tokens, block tables and columns in one int32 tensor.

A plan brings what has changed; that becomes segments of one host buffer (rows/table.py), which `Inputs.send` (engine/kit.py) brings to
their places. Padding requests of CUDA graphs use the row after the last. Owned by the stepper thread.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.extras import find_extra
from meshlm.protocol.samplers import SequenceBreakers
from meshlm.workers.batch import StepInputs, UncutRun
from meshlm.workers.memory import zeros
from meshlm.workers.rows.changes import I32, NOTHING
from meshlm.workers.rows.columns import ON_DEVICE, Column, num_ints
from meshlm.workers.rows.extras.extra import RowExtra
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.rows.table import RowTable

if TYPE_CHECKING:
    from meshlm.workers.rows.shared_prefixes import PrefixTables


def put(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copies to the device without waiting for it: the driver takes a copy of what is small, and the array may go."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


class MediaBuffers:
    """What images bring to a step beside `DeviceRows.vectors`: zeros, but for steps with rows that have some."""

    def __init__(self, rope_shift: Tensor | None, deepstack: Tensor | None) -> None:
        """rope_shift, deepstack: see StepInputs, of the most tokens; None: the model has none."""
        self.rope_shift, self.deepstack = rope_shift, deepstack
        self.in_use = False  # by the step that is being launched
        self.uncut: tuple[UncutRun, ...] = ()  # of that step

    def of_step(self, batch: StepInputs, count: int) -> StepInputs:
        """With the buffers' lines of its first `count` tokens, which all are."""
        shift, deepstack = self.rope_shift, self.deepstack
        return replace(
            batch,
            uncut=self.uncut,
            rope_shift=None if shift is None else shift[:, :count],
            deepstack=None if deepstack is None else deepstack[:, :count],
        )


class DeviceRows:
    """`state` is all of it on the device; `tokens`, `block_tables` and `columns` are views of it, by row. The table is the host's."""

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        shares: tuple[int, ...] = (),
        draft_lines: int = 0,
    ) -> None:
        """draft_lines: of a step's rows with drafts, at most: their drafts, and each row's known token."""
        self.table = table = RowTable(max_rows, max_model_len, block_size, num_groups, shares)
        self.max_rows, self.block_size, self.num_groups = max_rows, block_size, num_groups
        self.max_lines = max_rows + draft_lines  # of logits in a step
        self.state = zeros((table.num_ints,), torch.int32, device)
        self.tokens, self.block_tables = (
            self.state[region.begin : region.end].view(region.shape) for region in (table.tokens, table.block_tables)
        )
        begins = table.columns_at.tolist()
        self.columns = {column.name: self._view(column, begin) for column, begin in zip(ON_DEVICE, begins, strict=True)}
        # [tokens, hidden] of a step: what prompts bring in the place of tokens, if they may
        self.vectors: Tensor | None = None
        self.media: MediaBuffers | None = None  # of a model that takes images
        self.prefixes: PrefixTables | None = None  # where kernels read those of several rows together
        self.has_adapters = False  # rows may have some, which kernels add

    def _view(self, column: Column, begin: int) -> Tensor:
        """[rows], or [rows, width]; a number of 64 bits as its two halves. All rows are empty."""
        rows, ints = self.table.num_rows, num_ints(column)
        found = self.state[begin : begin + rows * ints]
        empty = np.ascontiguousarray(self.table.columns[column.name]).view(np.int32)
        found.copy_(torch.from_numpy(empty.ravel()))
        if column.dtype is np.float32:
            found = found.view(torch.float32)
        return found.view(rows, ints) if ints > 1 else found

    def changes(self, plan: StepPlan) -> tuple[I32, int]:
        """The changes that a plan makes, as changes.py packs them, and their number of segments."""
        if not (plan.new_rows or plan.removed_rows or plan.block_rows or plan.input_ids):
            return NOTHING, 0
        if self.prefixes is not None:
            for new in plan.new_rows:
                self.prefixes.take(new.row, self.table.pages(new.block_ids)[:, self.prefixes.group])
        return self.table.changes(plan)

    def step(self, plan: StepPlan) -> StepColumns:
        """The columns of a plan whose changes are known, and what its rows have: adapters, and prefixes that decodes share."""
        step = StepColumns(plan)
        step.adapted = self.has_adapters and bool(self.table.columns["adapter"][step.rows].any())
        if self.prefixes is not None:
            decodes = step.num_decodes
            step.shared = self.prefixes.of_decodes(step.rows[:decodes], step.starts[:decodes])
        return step

    def reset(self) -> None:
        self.table.reset()
        if self.prefixes is not None:
            self.prefixes.reset()


def breakers_buffer(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """int32 [rows, words]: token t is a sequence breaker of a row where bit t % 32 of word t / 32 is set."""
    return torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)


class SequenceBreakersRows(RowExtra[Tensor]):
    extra = SequenceBreakers

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def add_row(self, new: NewRow) -> None:
        breakers = find_extra(new.extras, SequenceBreakers)
        assert breakers is not None
        bits = np.zeros(self._buffer.shape[1] * 32, np.uint8)
        bits[np.frombuffer(breakers.token_ids, np.int32)] = 1
        self._buffer[new.row] = put(np.packbits(bits, bitorder="little").view(np.int32), self._buffer.device)

    def remove_row(self, row: int) -> None:
        self._buffer[row] = 0
