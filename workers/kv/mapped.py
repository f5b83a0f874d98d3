"""Memory of other processes of this host, mapped into this one: a file each, of which `PageMemory` says where pages lie.

Used by the mover thread alone. A mapping is kept, since the next pages come from the same memory, and given up once it has not been
used for a while: the memory of a process that is gone lives as long as somebody maps it.
"""

import mmap
import os
import stat
from typing import NamedTuple

import numpy as np

from meshlm.protocol.edges.kv import LEASE_S, PageMemory
from meshlm.workers.kv.pages import Column

UNUSED_S = LEASE_S


class BadMemory(Exception):
    """Pages cannot be copied from or to this memory; one line that names it."""


class Mapped(NamedTuple):
    """A file as it was when it was mapped. Its holder never makes it shorter (SharedBytes seals it): a page that is gone would end the
    process that reads it."""

    memory: mmap.mmap
    identity: tuple[int, int]  # of the file: another one may have come to its path
    size: int

    def is_whole(self) -> bool:
        """Whether the file still has all of its bytes."""
        return self.memory.size() >= self.size


class Mappings:
    """The files that are mapped now, by path and by whether they may be written."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[str, bool], tuple[Mapped, float]] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def find(self, path: str, now: float, *, writes: bool) -> Mapped:
        """The file at `path`, mapped. BadMemory."""
        found, _ = self._mapped.pop((path, writes), (None, 0.0))
        try:
            now_there = os.stat(path)
            if found is None or found.identity != (now_there.st_dev, now_there.st_ino) or not found.is_whole():
                found = _mapped(path, writes=writes)
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise BadMemory(f"{path}: {text}") from None
        self._mapped[path, writes] = found, now
        return found

    def close_unused(self, now: float) -> None:
        """Give up those that nobody has asked for within UNUSED_S."""
        for key in [key for key, (_, used) in self._mapped.items() if now - used >= UNUSED_S]:
            del self._mapped[key]


def _mapped(path: str, *, writes: bool) -> Mapped:
    """OSError, ValueError."""
    descriptor = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("no file that can be mapped")
        if not found.st_size:
            raise ValueError("an empty file")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        memory = mmap.mmap(descriptor, found.st_size, mmap.MAP_SHARED, access)
    finally:
        os.close(descriptor)
    return Mapped(memory, (found.st_dev, found.st_ino), found.st_size)


def columns_of(memory: PageMemory, mapped: Mapped) -> list[Column]:
    """Views of the file, one for each segment. BadMemory where they are not all within it."""
    columns = []
    for segment in memory.segments:
        offset, stride, length = segment.offset, segment.stride, segment.length
        last = offset + (memory.num_pages - 1) * stride
        if memory.num_pages < 1 or offset < 0 or length < 1 or stride < length or last + length > mapped.size:
            text = f"{memory.num_pages} pages of {length} bytes every {stride} from {offset} on"
            raise BadMemory(f"{memory.path}: {text} are not within its {mapped.size} bytes")
        column: Column = np.ndarray((memory.num_pages, length), np.uint8, mapped.memory, offset, (stride, 1))
        columns.append(column)
    return columns
