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


class KVPages(Protocol):
    """The pages of an engine. A sleep leaves them where they are."""

    num_pages: int
    page_bytes: int
    memory: PageMemory | None  # where other workers of this host may read them

    def mark(self) -> object:
        """A mark behind all steps launched so far; called by the stepper thread."""

    def copy(
        self, columns: Sequence[Column], places: Iterable[tuple[int, int]], *, is_load: bool, after: object = None
    ) -> None:
        """Copy pages from (is_load) or to other memory; called by the mover thread. places: a page here, and its line there, which are
        asked for one by one; all that were given are copied when this returns. after: a mark of steps that come before."""


class HostPages:
    """Pages in the memory of this process, where a step is done once it is launched."""

    def __init__(self, columns: Sequence[Column], memory: PageMemory | None = None) -> None:
        self._columns = columns
        self.num_pages = len(columns[0])
        self.page_bytes = sum(column.shape[1] for column in columns)
        self.memory = memory

    def mark(self) -> None:
        """Steps are done when they are launched."""

    def copy(
        self, columns: Sequence[Column], places: Iterable[tuple[int, int]], *, is_load: bool, after: object = None
    ) -> None:
        pieces = cut(self._columns, columns)
        if is_load:
            for here, there in places:
                for own, other in pieces:
                    own[here] = other[there]
        else:
            for here, there in places:
                for own, other in pieces:
                    other[there] = own[here]


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
