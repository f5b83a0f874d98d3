"""A step's inputs on a GPU with Triton: its columns and what changes in the rows, in one buffer that the host fills with one copy.

Two kernels do the rest on the device: `scatter` brings the changes to the rows, `prepare_inputs` makes the step's tensors of them.

Ints of the buffer, for a step that is padded to `size` requests (stride: `size`, aligned):

    0       stride   2 stride  3 stride   4 stride                changes_at
    | rows  | starts | ends    | places   | shared prefixes       | segments and data for kernels/prepare_inputs's `scatter`

rows, starts, ends: see kernels/prepare_inputs; padding requests have the dummy row and no tokens. places: of the requests that sample,
then of one that is padding. Shared prefixes: see rows/shared_prefixes.py; left out where a step has none. CUDA graphs keep the
addresses: the buffer never moves. Owned by the engine; used by the stepper thread.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.attention.kernel import ITEM, Columns, SharedPrefixes
from meshlm.kernels.lora.kernel import token_slots
from meshlm.kernels.prepare_inputs.kernel import prepare_inputs, scatter
from meshlm.workers.batch import UNKNOWN, KnownRequests, Prompt, StepInputs
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.rows.table import aligned

if TYPE_CHECKING:
    from meshlm.workers.lora.device_slots import DeviceSlots

INTS = 1 << 18  # more changes than fit beside the largest columns get a buffer of their own


class Staging:
    """Host buffers on their way to the GPU: pinned, in a ring, none reused before its copy is done."""

    def __init__(self, depth: int = 8) -> None:
        self._slots = [torch.empty(INTS, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
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


class TritonInputs:
    """See `TorchInputs`. For steps of up to `max_lines` requests and one that is padding (workers/graphs)."""

    def __init__(self, rows: DeviceRows, staging: Staging, device: torch.device, *, samples: bool = True) -> None:
        """samples: whether tokens are sampled here (not on a stage of a pipeline before the last)."""
        self._rows, self.staging, self._device, self._samples = rows, staging, device, samples
        self.verified: Columns | None = None  # where drafts are verified: the requests of the step
        self.queries = 1  # the most tokens of one of those
        self.adapters: DeviceSlots | None = None  # with --enable-lora
        self._buffer = torch.zeros(INTS, dtype=torch.int32, device=device)
        self._tables = rows.block_tables.unbind()

    @property
    def _changes_at(self) -> int:
        most, prefixes = self._rows.max_lines + 1, self._rows.prefixes
        return 4 * aligned(most) + (0 if prefixes is None else prefixes.offsets(most)[-1])

    def send(self, step: StepColumns, size: int, changes: I32, segments: int, places: NDArray[np.int64]) -> None:
        """Copy the step's columns, padded to `size` requests, and apply the changes: so many segments."""
        if not segments:
            prefixes = self._rows.prefixes if step.shared is not None else None
            more = 0 if prefixes is None else prefixes.offsets(size)[-1]
            host = np.zeros(4 * aligned(size) + more, np.int32)
            self._fill(host, step, size, places)
            self.staging.send(host, self._buffer)
            return
        beside = len(changes) <= INTS - self._changes_at
        host = np.zeros(self._changes_at + (len(changes) if beside else 0), np.int32)
        self._fill(host, step, size, places)
        if beside:
            host[self._changes_at :] = changes
        self.staging.send(host, self._buffer)
        scatter(self._buffer[self._changes_at :] if beside else self._apart(changes), segments, self._rows.state)

    def _fill(self, host: I32, step: StepColumns, size: int, places: NDArray[np.int64]) -> None:
        """The columns into `host`, which is all zeros."""
        stride, n, sampling = aligned(size), step.n, len(places)
        starts, ends, named = stride, 2 * stride, 3 * stride
        host[:n] = step.rows
        host[n:size] = self._rows.max_rows
        host[starts : starts + n] = step.starts
        np.add.accumulate(step.counts, out=host[ends : ends + n])
        host[ends + n : named] = step.t
        host[named : named + sampling] = places
        host[named + sampling : named + size] = n
        if step.shared is not None and self._rows.prefixes is not None:
            packed = self._rows.prefixes.packed(step.shared, size)
            host[4 * stride : 4 * stride + len(packed)] = packed

    def _apart(self, changes: I32) -> Tensor:
        """A copy on the GPU, of more than the buffer holds."""
        where = torch.empty(len(changes), dtype=torch.int32, device=self._device)
        self.staging.send(changes, where)
        return where

    def clear(self) -> None:
        """Requests without tokens, whatever their number: what is captured next computes nothing that counts."""
        self.staging.send(np.zeros(self._changes_at, np.int32), self._buffer)

    def columns(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """rows, starts, ends, places int32 [size] of a step that is padded to `size` requests."""
        stride = aligned(size)
        rows, starts, ends, places = (self._buffer[at * stride : at * stride + size] for at in range(4))
        return rows, starts, ends, places

    def of_step(self, step: StepColumns) -> StepInputs:
        count = len(step.places) if self._samples else 0
        first = step.num_decodes
        begins = np.add.accumulate(step.counts) - step.counts
        columns = (column[first:].tolist() for column in (step.rows, step.starts, begins, step.counts))
        known = KnownRequests(first, first, tuple(map(Prompt, *columns)))
        batch = self._batch((step.n, step.t), first, count, padded=False)
        if step.shows_drafts:
            batch = self._verified(batch)
        if step.adapted:
            batch = self._adapted(batch)
        return replace(batch, known=known, shared=self._shared(step.n) if step.shared is not None else {})

    def _shared(self, size: int) -> Mapping[int, SharedPrefixes]:
        """By group of layers, those of a step that was sent with them."""
        prefixes = self._rows.prefixes
        assert prefixes is not None
        base, sizes = 4 * aligned(size), prefixes.sizes
        items, members, tokens, parts = (base + at for at in prefixes.offsets(size)[:-1])
        num_items = sizes.num_items(size)
        lines = self._buffer[items : items + ITEM * num_items].view(num_items, ITEM)
        columns = [self._buffer[at : at + size] for at in (members, tokens, parts)]
        found = SharedPrefixes(lines, columns[0], columns[1], columns[2], sizes.tile, sizes.most_parts(size))
        return {prefixes.group: found}

    def num_lines(self, requests: int) -> int:
        """Lines of the head in a step that is padded to so many requests, of which one may be more than run."""
        return min(requests, self._rows.max_lines)

    def padded(
        self, requests: int, tokens: int, *, shared: bool = False, verified: bool = False, adapted: bool = False
    ) -> StepInputs:
        """The tensors of any step that was sent and fits, padded: as many tokens as requests are decodes, which all sample. shared:
        it was sent with prefixes that are shared, or cleared. verified: tokens see others of the step. adapted: rows may have
        adapters."""
        if tokens == requests:
            batch = self._batch((requests, tokens), requests, 0, padded=True)
        else:
            count = self.num_lines(requests) if self._samples else 0
            batch = self._batch((requests, tokens), UNKNOWN, count, padded=True)
        if adapted:
            batch = self._adapted(batch)
        if verified:
            return self._verified(batch)
        return replace(batch, shared=self._shared(requests)) if shared else batch

    def _adapted(self, batch: StepInputs) -> StepInputs:
        """A batch with what the adapters of its rows add."""
        assert batch.columns is not None and self.adapters is not None  # noqa: PT018
        of = batch.columns
        slots = token_slots(of.rows, of.ends, of.n, self._rows.columns["adapter"], len(batch.input_ids))
        return replace(batch, adapters=self.adapters.of_tokens(slots))

    def _verified(self, batch: StepInputs) -> StepInputs:
        """A batch whose decodes stand token by token. No more of its requests decode than it has tokens."""
        of = self.verified
        assert of is not None
        n = min(of.n, len(batch.input_ids))
        return replace(batch, verified=Columns(of.rows, of.starts, of.ends, n, of.blocks), queries=self.queries)

    def halves(self, step: StepColumns, batch: StepInputs, cut: int) -> tuple[StepInputs, StepInputs]:
        return halves_of(batch, cut)

    def decodes(self, rows: Tensor, starts: Tensor, ends: Tensor) -> StepInputs:
        """A token of each of these rows, int32 [n], at these places, or none where `ends` (prefix sums) do not grow; nobody samples."""
        n = len(rows)
        return self._of_columns(Columns(rows, starts, ends, n, self._tables[0]), n, n)

    def _of_columns(self, columns: Columns, count: int, num_decodes: int) -> StepInputs:
        """A batch of so many tokens, with padding, in which nobody samples."""
        input_ids, positions, slots = self._tokens(columns, count)
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=tuple(slots),
            block_tables=self._tables,
            logits_indices=None,
            num_decodes=num_decodes,
            columns=columns,
        )

    def following(self, batch: StepInputs) -> Tensor:
        """int64 [t]: behind each token of a batch, the next one of its row."""
        assert batch.columns is not None
        at = batch.columns
        return self._tokens(Columns(at.rows, at.starts + 1, at.ends, at.n, at.blocks), len(batch.input_ids))[0]

    def _tokens(self, of: Columns, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, positions [count] and slots [groups, count] of the columns' tokens, padded."""
        tables, block_size = self._rows.block_tables, self._rows.block_size
        ids = torch.empty(2 + len(tables), aligned(count), dtype=torch.int64, device=tables.device)
        out = (ids[0, :count], ids[1, :count], ids[2:, :count])
        prepare_inputs(of.rows, of.starts, of.ends, of.n, self._rows.tokens, tables, block_size, out)
        return out

    def _batch(self, sizes: tuple[int, int], num_decodes: int, count: int, *, padded: bool) -> StepInputs:
        """Makes a batch of so many requests with so many tokens, of which the `count` that are named in `places` sample."""
        size, tokens = sizes
        rows, starts, ends, places = self.columns(size)
        batch = self._of_columns(Columns(rows, starts, ends, size, self._tables[0]), tokens, num_decodes)
        last = None
        if count:
            places = places[:count]
            last = ends[places.long()].long() - 1
            if padded:
                last.clamp_(min=0)
        batch = replace(
            batch,
            logits_indices=last,
            places=places if count else None,
            vectors=None if self._rows.vectors is None else self._rows.vectors[:tokens],
        )
        return batch if self._rows.media is None else self._rows.media.of_step(batch, tokens)


def halves_of(batch: StepInputs, cut: int) -> tuple[StepInputs, StepInputs]:
    """The first `cut` tokens of a step and the rest, whatever its requests are; the host need not know. Nobody samples."""
    assert batch.columns is not None
    of, tokens = batch.columns, len(batch.input_ids)
    rows, starts, ends, size, tables = of.rows, of.starts, of.ends, of.n, of.blocks
    verified = (None, None) if batch.verified is None else _halves_of_requests(batch.verified, cut)
    if batch.num_decodes == size == tokens:
        columns = (
            Columns(rows[:cut].clone(), starts[:cut].clone(), ends[:cut].clone(), cut, tables),
            Columns(rows[cut:].clone(), starts[cut:].clone(), ends[cut:] - cut, size - cut, tables),
        )
        decodes = (cut, size - cut)
    else:
        columns = _halves_of_requests(of, cut)
        decodes = (UNKNOWN, UNKNOWN)
    parts = (slice(0, cut), slice(cut, tokens))
    first, second = (
        replace(
            batch,
            input_ids=batch.input_ids[part],
            positions=batch.positions[part],
            slot_mapping=tuple(slots[part] for slots in batch.slot_mapping),
            logits_indices=None,
            num_decodes=num_decodes,
            columns=mine,
            known=batch.known and batch.known.within(part.start, part.stop),
            places=None,
            vectors=None if batch.vectors is None else batch.vectors[part],
            rope_shift=None if batch.rope_shift is None else batch.rope_shift[:, part],
            deepstack=None if batch.deepstack is None else batch.deepstack[:, part],
            shared={},
            verified=checked,
        )
        for part, num_decodes, mine, checked in zip(parts, decodes, columns, verified, strict=True)
    )
    return first, second


def _halves_of_requests(of: Columns, cut: int) -> tuple[Columns, Columns]:
    """The same requests with those of their tokens that are before the step's token `cut`, and with the others."""
    before = torch.cat((of.ends.new_zeros(1), of.ends[:-1]))
    later = of.starts + (cut - before).clamp(min=0).minimum(of.ends - before)
    return (
        Columns(of.rows, of.starts, of.ends.clamp(max=cut), of.n, of.blocks),
        Columns(of.rows, later, (of.ends - cut).clamp(min=0), of.n, of.blocks),
    )
