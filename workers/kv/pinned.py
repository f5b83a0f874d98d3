"""Memory of another process that the GPU copies from and to by itself (DMA): a file that is mapped here, and pinned.

To pin memory takes as long as to write it for the first time, 0.8 s for a GiB, most of it until the kernel has given the memory. So
threads have it given from the first copy on, and it is pinned in stretches, each when a copy first needs it. Where the driver refuses,
copies go by way of its own buffers, more slowly.
"""

import mmap
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from meshlm.protocol.edges.kv import PageMemory
from meshlm.workers.cuda import driver
from meshlm.workers.kv.pages import HostColumns, HostMemory

STRETCH = 16 << 20
GIVERS = 4  # threads that have the kernel give memory
_log = structlog.get_logger()


class Run(NamedTuple):
    """Bytes of the host that one copy takes."""

    address: int
    num_bytes: int
    is_pinned: bool


class PinnedMemory:
    """Used by the mover's threads, whose driver calls are for the GPU."""

    def __init__(self, file: mmap.mmap, device: int) -> None:
        """device: the GPU's number."""
        self._device = device
        self._memory = HostMemory(file)
        self._bytes = np.frombuffer(file, np.uint8)
        self._begin = self._bytes.ctypes.data
        self._stretches: dict[int, bool] = {}  # whether it is pinned
        self._pinning = threading.Lock()
        self._refused = self._closed = False
        numbers = iter(range(-(-len(self._bytes) // STRETCH)))
        self._givers = [threading.Thread(target=self._give, args=(numbers,), daemon=True) for _ in range(GIVERS)]
        for giver in self._givers:
            giver.start()

    def _give(self, numbers: Iterator[int]) -> None:
        for nth in numbers:
            if self._closed:
                return
            self._touch(nth)

    def _touch(self, nth: int) -> NDArray[np.uint8]:
        stretch = self._bytes[nth * STRETCH :][:STRETCH]
        stretch[:: mmap.PAGESIZE].max()  # without Python's lock
        return stretch

    def pages(self, memory: PageMemory) -> "PinnedColumns":
        """As OtherMemory has it."""
        return PinnedColumns(self._memory.pages(memory), self)

    def runs(self, address: int, num_bytes: int) -> Iterator[Run]:
        """Cuts what is copied where another stretch begins: a copy may not span two."""
        end = address + num_bytes
        while address < end:
            nth = (address - self._begin) // STRETCH
            until = min(end, self._begin + (nth + 1) * STRETCH)
            yield Run(address, until - address, self._is_pinned(nth))
            address = until

    def _is_pinned(self, nth: int) -> bool:
        if (known := self._stretches.get(nth)) is None:
            with self._pinning:
                if (known := self._stretches.get(nth)) is None:
                    known = self._stretches[nth] = not self._refused and self._pin(nth)
        return known

    def _pin(self, nth: int) -> bool:
        stretch = self._touch(nth)  # else the driver makes other threads' calls wait until it is there
        try:
            driver.register(stretch.ctypes.data, len(stretch))
        except driver.DriverError as error:
            self._refused = True
            _log.warning("the host's memory for KV pages is not pinned: copies take longer", reason=str(error))
        return not self._refused

    def close(self) -> None:
        """As OtherMemory has it."""
        self._closed = True
        for giver in self._givers:
            giver.join()
        driver.use(self._device)  # the thread may be one that has copied nothing
        for nth, is_pinned in self._stretches.items():
            if is_pinned:
                driver.unregister(self._begin + nth * STRETCH)
        self._stretches.clear()


class PinnedColumns(HostColumns):
    """Pages of it."""

    def __init__(self, pages: HostColumns, memory: PinnedMemory) -> None:
        super().__init__(pages.columns)
        self.memory = memory
