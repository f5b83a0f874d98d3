"""The adapters of a worker's rows: those that it holds, and which of them the rows of a step have.

An adapter is loaded beside the steps, before its first row comes (`prepare`), and stays in the host's memory as long as it is among the
last `num_kept` that were used. Rows name it by a slot (Column "adapter"), of which a worker has --max-loras: schedulers start no row
that would need one more. Slots are given and taken by the stepper thread. Where kernels compute with adapters the slots are places in
the GPU's memory (device_slots.py).
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.edges.step import NewRow, RowFailed
from meshlm.protocol.extra_kind import ExtraKind
from meshlm.protocol.extras import find_extra
from meshlm.runtime.errors import ModelFilesError
from meshlm.workers.lora.step_adapters import StepAdapters, TokensOfAdapter
from meshlm.workers.lora.weights import LoadedAdapter
from meshlm.workers.rows.columns import RowColumns
from meshlm.workers.rows.device_rows import put
from meshlm.workers.rows.extras.extra import RowExtra, StepExtra, StepFindings
from meshlm.workers.rows.step_columns import StepColumns

if TYPE_CHECKING:
    from meshlm.workers.lora.device_slots import DeviceSlots  # by Triton, which may not be there

NO_SLOT = 0


class AdapterRows(RowExtra[Tensor]):
    extra = Adapter

    def __init__(
        self,
        load: Callable[[Adapter], LoadedAdapter],
        columns: RowColumns,
        device: torch.device,
        slots: int,
        kept: int,
        measure: Callable[[LoadedAdapter], None] = lambda _: None,
        in_memory: "DeviceSlots | None" = None,
    ) -> None:
        """load: raises ModelFilesError. slots: adapters of a step at most. kept: in the host's memory. measure: what depends on the
        base's weights is computed again, in place. in_memory: of a GPU, where they are."""
        self._load, self._columns, self._device, self._kept = load, columns, device, kept
        self._measure, self._epoch = measure, 0  # of the base's weights
        self._in_memory, slots = in_memory, slots if in_memory is None else in_memory.count
        self._held: dict[bytes, LoadedAdapter] = {}  # by digest; the last used last
        self._lock = threading.Lock()  # of these two
        self._loading: dict[bytes, threading.Lock] = {}
        self._slots: list[LoadedAdapter | None] = [None] * (slots + 1)  # NO_SLOT holds none
        self._rows: dict[int, int] = {}  # slot by row
        self._first: dict[int, int] = {}  # position of the first token that it changes, by row
        self._failed: dict[int, RowFailed] = {}  # by row

    def prepare(self, extra: ExtraKind) -> RowFailed | None:
        assert isinstance(extra, Adapter)
        try:
            found = self._get(extra)
        except ModelFilesError as error:
            return _failed(error)
        if self._in_memory is not None:
            self._in_memory.prepare(found)
        return None

    def _get(self, adapter: Adapter) -> LoadedAdapter:
        """The adapter, read if it is not held. Threads that want the same one read it once."""
        with self._lock:
            turn = self._loading.setdefault(adapter.digest, threading.Lock())
        with turn:
            with self._lock:
                found = self._held.pop(adapter.digest, None)
            if found is not None:
                self._hold(found)
                return found
            while True:
                epoch, found = self._epoch, self._load(adapter)
                self._hold(found)
                if epoch == self._epoch:  # else it may be of weights that are gone
                    return found

    def _hold(self, found: LoadedAdapter) -> None:
        """Keeps it as the one used last, and forgets those used least recently where there are too many: slots hold theirs, too."""
        digest = found.adapter.digest
        with self._lock:
            self._loading.pop(digest, None)
            self._held.pop(digest, None)
            self._held[digest] = found
            for other in list(self._held)[: max(0, len(self._held) - self._kept)]:
                del self._held[other]

    def drop(self, key: bytes) -> None:
        """No new request will name it: its memory is free once its last row is gone. Called by the stepper thread."""
        with self._lock:
            self._held.pop(key, None)
        for slot, loaded in enumerate(self._slots):
            if loaded is not None and loaded.adapter.digest == key and slot not in self._rows.values():
                self._slots[slot] = None
        if self._in_memory is not None:
            self._in_memory.drop(key)

    def weights(self) -> list[Tensor]:
        return [] if self._in_memory is None else self._in_memory.tensors()

    def sleep(self, *, awake: bool) -> None:
        if self._in_memory is not None:
            self._in_memory.sleep(awake=awake)

    # --- the stepper thread ---

    def weights_changed(self) -> None:
        """What is read just now is read again by who reads it."""
        with self._lock:
            held, self._epoch = list(self._held.values()), self._epoch + 1
        held += [one for one in self._slots if one is not None]
        for one in {id(one): one for one in held}.values():
            self._measure(one)

    def add_row(self, new: NewRow) -> None:
        adapter = find_extra(new.extras, Adapter)
        assert adapter is not None
        used = set(self._rows.values())
        slot = next(
            (n for n, one in enumerate(self._slots) if one is not None and one.adapter.digest == adapter.digest), 0
        )
        if slot == NO_SLOT:
            try:
                loaded = self._get(adapter)  # held, unless many others were loaded since
            except ModelFilesError as error:
                self._failed[new.row] = _failed(error)
                return
            free = [n for n in range(1, len(self._slots)) if n not in used]
            assert free, "the scheduler has started rows of more adapters than there are slots"
            if self._in_memory is None:
                slot = next((n for n in free if self._slots[n] is None), free[0])
            else:
                slot = 1 + self._in_memory.take(loaded)
            self._slots[slot] = loaded
        elif (held := self._slots[slot]) is not None:
            self._hold(held)
        self._rows[new.row], self._first[new.row] = slot, adapter.first

    def remove_row(self, row: int) -> None:
        self._failed.pop(row, None)
        self._first.pop(row, None)
        slot = self._rows.pop(row, NO_SLOT)
        held = self._slots[slot]
        if held is None or slot in self._rows.values():
            return
        if self._in_memory is not None:
            self._in_memory.leave(slot - 1)
        if self._in_memory is not None or held.adapter.digest not in self._held:
            self._slots[slot] = None  # dropped, or used less recently than others

    def columns_of(self, new: NewRow) -> dict[str, int]:
        return {"adapter": self._rows.get(new.row, NO_SLOT), "adapted_from": self._first.get(new.row, 0)}

    def of_step(self, step: StepColumns) -> StepAdapters | None:
        """What the layers add in this step; None where none of its rows has an adapter."""
        slots = self._columns["adapter"]
        if not slots[step.rows].any():
            return None
        rows, positions = step.of_tokens()
        of_tokens = np.where(positions >= self._columns["adapted_from"][rows], slots[rows], NO_SLOT)
        groups = []
        for slot in np.unique(of_tokens[of_tokens > NO_SLOT]).tolist():
            loaded, places = self._slots[slot], np.flatnonzero(of_tokens == slot)
            assert loaded is not None
            tokens = None if len(places) == len(of_tokens) else put(places, self._device)
            groups.append(TokensOfAdapter(tokens, loaded.layers, loaded.embedding, loaded.head, loaded.experts))
        return StepAdapters(groups) if groups else None

    def for_step(self, step: StepColumns) -> StepExtra[Tensor] | None:
        failed = {place: self._failed[row] for place, row in enumerate(step.rows.tolist()) if row in self._failed}
        return FailedRows(failed) if failed else None


def _failed(error: ModelFilesError) -> RowFailed:
    return RowFailed(str(error), param="model")


class FailedRows(StepExtra[Tensor]):
    """The rows of a step whose adapter could not be read again."""

    def __init__(self, failed: dict[int, RowFailed]) -> None:
        self._failed = failed

    def findings(self) -> StepFindings:
        return StepFindings(failed=self._failed)
