"""KV pages on a GPU that other ranks of the host read: exported by CUDA IPC, and opened by who reads them.

The handle travels in PageMemory, with the path of a file of the process that has the memory: while the file is there the memory is. The
KV tensors are one allocation then. Nobody sleeps whose memory others have open: the GPU would not get it back.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from meshlm.kernels.copy_pages.kernel import Columns, columns_at
from meshlm.protocol.edges.kv import PageMemory, Segment
from meshlm.workers.cuda import driver
from meshlm.workers.kv.pages import BadMemory, SharedBytes


class Exported:
    """Columns of one allocation of this process, uint8 [pages, bytes] each, as others get to know of them."""

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._file = SharedBytes(mmap.PAGESIZE)
        handle, base = driver.export(columns[0].data_ptr())
        segments = (Segment(each.data_ptr() - base, each.stride(0), each.shape[1]) for each in columns)
        self.memory = PageMemory(self._file.path, len(columns[0]), tuple(segments), handle)


class PeerColumns:
    """Pages of a GPU's memory that another process has exported."""

    def __init__(self, memory: PageMemory, base: int, width: int, device: torch.device) -> None:
        """The addresses go to the GPU in the current stream. BadMemory."""
        self.num_pages, self.page_bytes = memory.num_pages, memory.page_bytes
        stride, lengths = memory.segments[0].stride, {segment.length for segment in memory.segments}
        if lengths != {width} or {segment.stride for segment in memory.segments} != {stride}:
            raise BadMemory(f"{memory.path}: its columns have {lengths} bytes for a page, and those here {width}")
        self.columns: Columns = columns_at([base + segment.offset for segment in memory.segments], stride, device)


class PeerMemory:
    """Used by the mover's thread of loads: nothing is saved to a peer."""

    def __init__(self, memory: PageMemory, width: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        """width: bytes of a page in each column. BadMemory."""
        self._width, self._device, self._stream = width, device, stream
        self._known: dict[PageMemory, PeerColumns] = {}
        try:
            self._base = driver.open_exported(memory.handle)
        except driver.DriverError as error:
            raise BadMemory(f"{memory.path}: {error}") from None

    def pages(self, memory: PageMemory) -> PeerColumns:
        """As OtherMemory has it."""
        if (known := self._known.get(memory)) is None:
            with torch.cuda.stream(self._stream):
                known = self._known[memory] = PeerColumns(memory, self._base, self._width, self._device)
        return known

    def close(self) -> None:
        """As OtherMemory has it."""
        driver.use(self._device.index)  # the thread may be one that has copied nothing
        driver.close_exported(self._base)
