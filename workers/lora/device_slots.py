"""The adapters in a GPU's memory: a fixed number of slots of equal size, which CUDA graphs know by their addresses.

There is a slot for each adapter that the rows of a step may have, and SPARE more: an adapter whose first request waits is copied into a
slot that no row uses, by a stream of its own, while the others go on. One that finds no such slot is copied when it gets a row, and the
steps behind that wait for it on the device. The slot of an adapter whose rows have gone keeps it until another one needs the place.
Threads that prepare requests and the stepper thread share this; one copies at a time.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels.lora.kernel import in_order
from meshlm.kernels.lora.layout import NUMBERS, Memory, Packed, wide_of
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.lora.device_adapters import DeviceStepAdapters
from meshlm.workers.lora.side_stream import side_stream_of
from meshlm.workers.lora.slot_layout import SlotLayout
from meshlm.workers.lora.weights import LoadedAdapter

SPARE = 1
WAIT_S = 60.0  # for another thread's copy, which takes milliseconds


@dataclass(slots=True)
class _Slot:
    digest: bytes | None = None  # of the adapter that is there
    has_rows: bool = False
    is_loading: bool = False
    prepared_at: int | None = None  # `_num_taken` then, where it waits for its first row
    used_at: int = 0  # `_num_taken` when it was taken last
    left: Any = None  # what the stream has to wait for before it may write here

    def rank(self, num_taken: int, count: int) -> tuple[bool, bool, int]:
        """The slot with the least is the first to be given away."""
        return self.digest is not None, self.waits(num_taken, count), self.used_at

    def waits(self, num_taken: int, count: int) -> bool:
        """Whether a request that has not come yet is likely to need it: some never come."""
        return self.prepared_at is not None and num_taken - self.prepared_at <= count


class DeviceSlots:
    """Slots are counted from 0 here; Column "adapter" (rows/columns.py) has one more."""

    def __init__(self, layout: SlotLayout, max_loras: int, dtype: torch.dtype, device: torch.device) -> None:
        """ProcessFatal where there is no memory for them."""
        self._layout, self.count = layout, max_loras + SPARE
        self._size, matrices = layout.num_values, layout.num_matrices
        try:
            values = torch.zeros(self.count * self._size, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            gib = self.count * self._size * dtype.itemsize / 2**30
            raise ProcessFatal(
                f"--enable-lora: {self.count} slots of adapters take {gib:.1f} GiB, which the GPU has not; lower --max-loras or "
                "--max-lora-rank, or name --lora-target-modules"
            ) from None
        places = torch.zeros(self.count, matrices, NUMBERS, dtype=torch.int64, device=device)
        self.memory = Memory(values, places, wide_of(layout.max_rank))
        self.shapes, self.max_rank = layout.shapes(), layout.max_rank
        self.asked: set[Any] = set()  # layers that steps with adapters have asked for
        self._stream = side_stream_of(device)
        self._copying = threading.Lock()
        self._changed = threading.Condition()  # of all below
        self._slots = [_Slot() for _ in range(self.count)]
        self._num_taken, self._is_awake = 0, True

    def of_tokens(self, slots: Tensor) -> DeviceStepAdapters:
        """The adapters of a step whose tokens have these slots, int32 [t]; -1: none."""
        return DeviceStepAdapters(self._layout.layers, self.memory, in_order(slots, self.count), self.asked)

    def packed(self, loaded: LoadedAdapter) -> LoadedAdapter:
        """An adapter as slots have it. ModelFilesError."""
        if self.asked and not self.asked.issuperset(loaded.layers):
            raise ModelFilesError(f"{loaded.adapter.path}: it changes layers that this model computes past adapters")
        packed = self._layout.pack(loaded, self.memory.values.dtype)
        if len(packed.values) > self._size:
            raise ModelFilesError(f"{loaded.adapter.path}: it has more matrices than --lora-target-modules leaves")
        return LoadedAdapter(loaded.adapter, {}, packed=packed)

    # --- threads that prepare requests ---

    def prepare(self, loaded: LoadedAdapter) -> None:
        """Has it in a slot before its first row comes, if one is free. Waits until it is there."""
        digest = loaded.adapter.digest
        with self._changed:
            if not self._is_awake or any(slot.digest == digest for slot in self._slots):
                return
            free = self._free()
            if not free or free[0].waits(self._num_taken, self.count):
                return
            slot = free[0]
            slot.digest, slot.is_loading, slot.prepared_at = digest, True, self._num_taken
        try:
            self._copy(slot, loaded).synchronize()
        except BaseException:
            slot.digest = None
            raise
        finally:
            with self._changed:
                slot.is_loading = False
                self._changed.notify_all()

    # --- the stepper thread ---

    def take(self, loaded: LoadedAdapter) -> int:
        """The slot of an adapter that gets its first row: what is launched from now on finds it there."""
        digest = loaded.adapter.digest
        with self._changed:
            if not self._changed.wait_for(lambda: self._slot_for(digest) is not None, WAIT_S):
                raise RuntimeError("no slot of adapters has become free: the scheduler has started too many")
            slot = self._slot_for(digest)
            assert slot is not None
            is_there, slot.digest = slot.digest == digest, digest
            self._num_taken += 1
            slot.has_rows, slot.prepared_at, slot.used_at = True, None, self._num_taken
        if not is_there:
            self._copy(slot, loaded).hold_back_steps()
        return self._slots.index(slot)

    def _slot_for(self, digest: bytes) -> _Slot | None:
        for slot in self._slots:
            if slot.digest == digest:
                return None if slot.is_loading else slot
        free = self._free()
        return free[0] if free else None

    def leave(self, number: int) -> None:
        """Its last row has gone; steps that are on their way may read it still."""
        slot = self._slots[number]
        mark = self._stream.mark()
        with self._changed:
            slot.has_rows, slot.left = False, mark
            self._changed.notify_all()

    def drop(self, digest: bytes) -> None:
        """No new request will name it."""
        with self._changed:
            for slot in self._slots:
                if slot.digest == digest and not slot.has_rows and not slot.is_loading:
                    slot.digest = slot.prepared_at = None

    def _free(self) -> list[_Slot]:
        """Those that no row has, the first to be given away first."""
        free = [slot for slot in self._slots if not slot.has_rows and not slot.is_loading]
        return sorted(free, key=lambda slot: slot.rank(self._num_taken, self.count))

    def _copy(self, slot: _Slot, loaded: LoadedAdapter) -> Any:
        """Copies an adapter into a slot that nobody else may have; gives the mark behind it."""
        packed = loaded.packed
        assert packed is not None
        number = next(nth for nth, one in enumerate(self._slots) if one is slot)
        values, places = self._in_slot(packed, number * self._size)
        with self._copying:
            self._stream.wait_for(slot.left)
            self._stream.copy(values, self.memory.values[number * self._size :])
            return self._stream.copy(places, self.memory.places[number])

    @staticmethod
    def _in_slot(packed: Packed, begin: int) -> tuple[Tensor, Tensor]:
        places = packed.places.clone()
        places[:, :2] += begin
        return packed.values, places

    # --- sleep ---

    def tensors(self) -> list[Tensor]:
        return [self.memory.values]

    def sleep(self, *, awake: bool) -> None:
        """While it sleeps nothing is written to the slots."""
        with self._changed:
            self._is_awake = awake
            self._changed.wait_for(lambda: not any(slot.is_loading for slot in self._slots), WAIT_S)
