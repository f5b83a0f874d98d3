"""The persistent rows on the device, GPU or CPU: all tokens, block tables and sampling columns in one int32 tensor.

A plan brings what has changed; that becomes segments of one host buffer, which `Inputs.send` (inputs.py) brings to their places.
Padding requests of CUDA graphs use the row after the last. Owned by the stepper thread.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.tasks import Pool
from meshlm.workers.engine.changes import I32, Changes
from meshlm.workers.engine.columns import StepColumns
from meshlm.workers.engine.row_audio import RowAudio
from meshlm.workers.engine.row_embeds import RowEmbeds
from meshlm.workers.memory import zeros
from meshlm.workers.output.grammars import unconstrained
from meshlm.workers.output.sampler import SampleRows
from meshlm.workers.output.table import ALWAYS, EDITS, SamplingTable, edits
from meshlm.workers.rows import Pooling, pooling

if TYPE_CHECKING:
    from meshlm.workers.engine.shared_prefixes import PrefixTables

NOTHING = np.empty(0, np.int32)
ALIGN = 16  # ints; Triton compiles another variant for pointers that are less aligned


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


class _Layout:
    """Hands out regions of one int32 tensor, each aligned."""

    def __init__(self) -> None:
        self.num_ints = 0

    def add(self, ints: int) -> int:
        """Adds a region of this many ints, and gives the index where it begins."""
        begin = self.num_ints
        self.num_ints += aligned(ints)
        return begin


class SamplingColumns(NamedTuple):
    """Columns by row with what sampling, truncation, penalties and edits of logits need (kernels/sample, top_k_top_p, penalties)."""

    temperature: Tensor  # float32 [rows]
    min_p: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    seeds: Tensor  # int32 [rows, 2]: low and high half
    prompt_lens: Tensor  # int32
    repetition: Tensor  # float32
    presence: Tensor
    frequency: Tensor
    num_edits: Tensor  # int32
    edit_ids: Tensor  # int32 [rows, EDITS]
    edit_adds: Tensor  # float32 [rows, EDITS]
    edit_untils: Tensor  # int32 [rows, EDITS]


class DeviceRows:
    """Row `max_rows` is the dummy of padding.

    `state` is all of it on the device; `tokens`, `block_tables` and `sampling` are views of it, by row, floats kept as their bits.
    `block_tables` [groups, rows, blocks] has one for each group of layers (protocol/kv.py); those of a row grow together. A page of a
    group of which several layers share a tensor (`shares` by group) is so many virtual pages, and the table names the first.
    `num_prompt` and `table` are the host's: what the launch of a step depends on.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        shares: tuple[int, ...] = (),
    ) -> None:
        rows = max_rows + 1
        self.max_rows, self.block_size, self.num_groups = max_rows, block_size, num_groups
        self._shares = np.array(shares or (1,) * num_groups, np.int32)
        self._width = aligned(max_model_len + 1)
        self._table = aligned(-(-max_model_len // block_size))
        layout = _Layout()
        self._tokens_at = layout.add(rows * self._width)
        self._tables_at = layout.add(num_groups * rows * self._table) + np.arange(num_groups) * rows * self._table
        self._seeds_at = layout.add(2 * rows)
        self._prompts_at, self._temperature_at, self._min_p_at, self._top_k_at, self._top_p_at = (
            layout.add(rows) for _ in range(5)
        )
        self._penalties_at = [layout.add(rows) for _ in range(3)]  # repetition, presence, frequency
        self._num_edits_at = layout.add(rows)
        self._edits_at = [layout.add(rows * EDITS) for _ in range(3)]  # ids, what is added, before which output index
        self.state = zeros((layout.num_ints,), torch.int32, device)
        self._view_sampling(rows)
        self.num_prompt = np.zeros(rows, np.int64)
        self.second_from = np.zeros(rows, np.int64)  # of a pair of texts: where the second begins; 0: there is none
        self.table = SamplingTable(rows)
        self._num_blocks = np.zeros(rows, np.int64)
        self.pools: dict[int, Pool] = {}  # rows that want a vector
        self.embeds = RowEmbeds()
        self.audio = RowAudio(device)
        self.prefixes: PrefixTables | None = None  # where kernels read those of several rows together

    def _view_sampling(self, rows: int) -> None:
        def ints(begin: int, width: int = 1) -> Tensor:
            flat = self.state[begin : begin + rows * width]
            return flat.view(rows, width) if width > 1 else flat

        def floats(begin: int, width: int = 1) -> Tensor:
            return ints(begin, width).view(torch.float32)

        self.tokens = ints(self._tokens_at, self._width)
        self.block_tables = ints(int(self._tables_at[0]), self.num_groups * self._table).view(-1, rows, self._table)
        repetition, presence, frequency = self._penalties_at
        ids, adds, untils = self._edits_at
        self.sampling = SamplingColumns(
            floats(self._temperature_at),
            floats(self._min_p_at),
            ints(self._top_k_at),
            floats(self._top_p_at),
            ints(self._seeds_at, 2),
            ints(self._prompts_at),
            floats(repetition),
            floats(presence),
            floats(frequency),
            ints(self._num_edits_at),
            ints(ids, EDITS),
            floats(adds, EDITS),
            ints(untils, EDITS),
        )
        self.sampling.repetition.fill_(1.0)

    def changes(self, plan: StepPlan) -> tuple[I32, int]:
        """The changes that a plan makes, as changes.py packs them, and their number of segments."""
        if plan.removed_rows and (self.pools or self.embeds or self.table.processors is not None):
            removed = np.frombuffer(plan.removed_rows, np.int32).tolist()
            self.embeds.leave(removed)
            for row in removed:
                self.pools.pop(row, None)
            if self.table.processors is not None:
                self.table.processors.leave(removed)
        if not (plan.new_rows or plan.block_rows or plan.input_ids):
            return NOTHING, 0
        changes = Changes()
        for new in plan.new_rows:
            self._take(new, changes)
        if plan.block_rows:
            rows = np.frombuffer(plan.block_rows, np.int32)
            ids = np.frombuffer(plan.block_ids, np.int32).reshape(-1, self.num_groups) * self._shares
            changes.singles(self._appended(rows), ids.ravel())
        if plan.input_ids:  # a pipeline: the last stage sampled them
            ids = np.frombuffer(plan.input_ids, np.int32)
            rows, starts = (np.frombuffer(column, np.int32)[: len(ids)] for column in (plan.rows, plan.starts))
            changes.singles(self._tokens_at + rows * self._width + starts, ids)
        return changes.packed()

    def step(self, plan: StepPlan) -> StepColumns:
        """The columns of a plan whose changes are known, and which of its decodes share prefixes."""
        step = StepColumns(plan)
        if self.prefixes is not None:
            decodes = step.num_decodes
            step.shared = self.prefixes.of_decodes(step.rows[:decodes], step.starts[:decodes])
        return step

    def _take(self, new: NewRow, changes: Changes) -> None:
        """A request takes a row."""
        row, sampling = new.row, unconstrained(new.sampling)
        self.table.set(row, sampling)
        if self.table.processors is not None and self.table.processors.take(new):
            self.table.by_torch_until[row] = ALWAYS
        self.embeds.take(row, new.embeds)
        self.second_from[row] = 0
        if isinstance(new.task, Pool):
            self.pools[row] = new.task
            self.second_from[row] = new.task.second_from
        blocks = np.frombuffer(new.block_ids, np.int32).reshape(-1, self.num_groups) * self._shares
        self.audio.take(new.audio, blocks[0].tolist() if len(blocks) else ())
        self.num_prompt[row] = new.num_prompt_tokens
        self._num_blocks[row] = len(blocks)
        if self.prefixes is not None:
            self.prefixes.take(row, blocks[:, self.prefixes.group])
        changes.run(self._tokens_at + row * self._width, np.frombuffer(new.token_ids, np.int32))
        for table, column in zip(self._tables_at.tolist(), blocks.T, strict=True):
            changes.run(table + row * self._table, column)
        changes.one(self._temperature_at + row, sampling.temperature, np.float32)
        changes.one(self._min_p_at + row, sampling.min_p, np.float32)
        changes.one(self._top_k_at + row, max(0, sampling.top_k), np.int32)
        changes.one(self._top_p_at + row, sampling.top_p, np.float32)
        changes.one(self._seeds_at + 2 * row, sampling.seed, np.uint64)
        changes.one(self._prompts_at + row, new.num_prompt_tokens, np.int32)
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        for begin, value in zip(self._penalties_at, penalties, strict=True):
            changes.one(begin + row, value, np.float32)
        found = edits(sampling) or []
        changes.one(self._num_edits_at + row, len(found), np.int32)
        if found:
            ids, adds, untils = zip(*found, strict=True)
            columns = (np.array(ids, np.int32), np.array(adds, np.float32).view(np.int32), np.array(untils, np.int32))
            for begin, column in zip(self._edits_at, columns, strict=True):
                changes.run(begin + row * EDITS, column)

    def _appended(self, rows: I32) -> NDArray[np.int64]:
        """Places of new blocks, in each group. A row may get several; its pairs stand together and in order."""
        first = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        lengths = np.diff(np.append(first, len(rows)))
        nth = np.arange(len(rows)) - np.repeat(first, lengths)
        within = rows.astype(np.int64) * self._table + self._num_blocks[rows] + nth
        self._num_blocks[rows[first]] += lengths
        places: NDArray[np.int64] = (within[:, None] + self._tables_at).ravel()
        return places

    def pooling(self, step: StepColumns) -> list[Pooling]:
        """The requests whose vectors are made of this step's hidden states."""
        wanted = pooling(self.pools, step.rows, step.starts, step.counts, self.num_prompt)
        return [each for each in wanted if each.takes_states]

    def sample_rows(self, step: StepColumns, places: NDArray[np.int64]) -> SampleRows:
        """The requests at these places, which sample."""
        rows = step.rows[places]
        lens = (step.starts + step.counts)[places].astype(np.int64)
        prompt_lens = self.num_prompt[rows]
        return SampleRows(rows, lens - prompt_lens, lens, prompt_lens)

    def reset(self) -> None:
        """Forget all requests: rows are taken anew."""
        self.table.special.clear()
        self.table.logprob_token_ids.clear()
        if self.table.processors is not None:
            self.table.processors.reset()
        self.pools.clear()
        self.embeds.reset()
        self.audio.reset()
        if self.prefixes is not None:
            self.prefixes.reset()
