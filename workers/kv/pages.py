"""The pages of one worker's KV cache as bytes, whatever layers and groups they are of: what the mover copies (mover.py).

A page is a line of each column, one behind the other: a column is uint8 [pages, bytes]. On the host that is a half of a KV tensor (or,
with `--device fake`, all there is); other memory has columns of other widths, and the same bytes in all. No torch.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.edges.kv import PageMemory, Segment

Column = NDArray[np.uint8]
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class BadMemory(Exception):
    """Pages cannot be copied from or to this memory; one line that names it."""


class OtherPages(Protocol):
    """Pages of other memory."""

    num_pages: int
    page_bytes: int


class OtherMemory(Protocol):
    """Memory of another process that this one has opened."""

    def pages(self, memory: PageMemory) -> OtherPages:
        """Those of which `memory` says where they lie. BadMemory."""

    def close(self) -> None:
        """Nobody uses any of its pages."""


class KVPages(Protocol):
    """The pages of an engine. A sleep leaves them where they are."""

    num_pages: int
    page_bytes: int
    memory: PageMemory | None  # where other workers of this host may read them
    pins: bool  # whether files of other processes are mapped writable, as a GPU knows no others

    def mark(self) -> object:
        """A mark behind all steps launched so far; called by the stepper thread."""

    def open(self, memory: PageMemory, file: mmap.mmap) -> OtherMemory:
        """What a process has at `memory`; `file` is its file, mapped. Called by one of the mover's threads at a time. BadMemory."""

    def copy(
        self, other: OtherPages, places: Iterable[tuple[int, int]], *, is_load: bool, after: object = None
    ) -> None:
        """Copy pages from (is_load) or to other memory; one thread calls it for loads, and another for saves. places: a page here, and
        its line there, which are asked for one by one; all that were given are copied when this returns. after: a mark of steps that
        come before."""


class HostColumns:
    """Pages of memory that this process has mapped."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self.num_pages = len(columns[0])
        self.page_bytes = sum(column.shape[1] for column in columns)


class HostMemory:
    """A file of another process, mapped here."""

    def __init__(self, file: mmap.mmap) -> None:
        self._file = file

    def pages(self, memory: PageMemory) -> HostColumns:
        """Views of the file, one for each segment."""
        columns, size = list[Column](), len(self._file)
        for segment in memory.segments:
            offset, stride, length = segment.offset, segment.stride, segment.length
            last = offset + (memory.num_pages - 1) * stride
            if memory.num_pages < 1 or offset < 0 or length < 1 or stride < length or last + length > size:
                text = f"{memory.num_pages} pages of {length} bytes every {stride} from {offset} on"
                raise BadMemory(f"{memory.path}: {text} are not within its {size} bytes")
            column: Column = np.ndarray((memory.num_pages, length), np.uint8, self._file, offset, (stride, 1))
            columns.append(column)
        return HostColumns(columns)

    def close(self) -> None:
        """It is unmapped with the last view of it."""


class HostPages:
    """Pages in the memory of this process, where a step is done once it is launched."""

    pins = False

    def __init__(self, columns: Sequence[Column], memory: PageMemory | None = None) -> None:
        self._columns = columns
        self.num_pages = len(columns[0])
        self.page_bytes = sum(column.shape[1] for column in columns)
        self.memory = memory

    def mark(self) -> None:
        """Steps are done when they are launched."""

    def open(self, memory: PageMemory, file: mmap.mmap) -> HostMemory:
        """As KVPages has it."""
        if memory.handle:
            raise BadMemory(f"{memory.path}: memory of a GPU, which the host cannot read")
        return HostMemory(file)

    def copy(
        self, other: OtherPages, places: Iterable[tuple[int, int]], *, is_load: bool, after: object = None
    ) -> None:
        """As KVPages has it."""
        assert isinstance(other, HostColumns), "no memory of another kind is opened here"
        pieces = cut(self._columns, other.columns)
        if is_load:
            for here, there in places:
                for own, others in pieces:
                    own[here] = others[there]
        else:
            for here, there in places:
                for own, others in pieces:
                    others[there] = own[here]


def cut(one: Sequence[Column], other: Sequence[Column]) -> list[tuple[Column, Column]]:
    """The columns of both sides, cut where either begins a new one. Both have as many bytes a line."""
    return [(left.of(one), right.of(other)) for left, right in _pieces(one, other)]


class _Piece(NamedTuple):
    column: int
    begin: int
    end: int

    def of(self, columns: Sequence[Column]) -> Column:
        return columns[self.column][:, self.begin : self.end]


def _pieces(one: Sequence[Column], other: Sequence[Column]) -> Iterator[tuple[_Piece, _Piece]]:
    nth, mth, begin, first = 0, 0, 0, 0
    while nth < len(one):
        count = min(one[nth].shape[1] - begin, other[mth].shape[1] - first)
        yield _Piece(nth, begin, begin + count), _Piece(mth, first, first + count)
        begin, first = begin + count, first + count
        if begin == one[nth].shape[1]:
            nth, begin = nth + 1, 0
        if first == other[mth].shape[1]:
            mth, first = mth + 1, 0


class SharedBytes:
    """Memory that other processes of this host can map, all zeros: a file without a folder, of a size that nobody changes. It lives as
    long as an array of it."""

    def __init__(self, size: int) -> None:
        """OSError, MemoryError."""
        descriptor = os.memfd_create("kv-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        mapped = mmap.mmap(descriptor, size)
        weakref.finalize(mapped, os.close, descriptor)
        with suppress(OSError):  # a kernel without large pages
            mapped.madvise(mmap.MADV_HUGEPAGE)  # where /sys/kernel/mm/transparent_hugepage/shmem_enabled has advise
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.array = np.frombuffer(mapped, np.uint8)

    def memory(self, columns: Sequence[Column]) -> PageMemory:
        """The name of these parts of it for other processes."""
        base = self.array.ctypes.data
        segments = tuple(Segment(each.ctypes.data - base, each.strides[0], each.shape[1]) for each in columns)
        return PageMemory(self.path, len(columns[0]), segments)
