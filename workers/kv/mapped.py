"""Memory of other processes of this host, opened in this one: a file each, of which `PageMemory` says where pages lie.

Used by the mover's threads. What is open is kept, since the next pages come from the same memory, and given up once its process is
gone and no copy uses it: the memory of such a process lives as long as somebody has it open, and that of a GPU is needed by the process
that follows.
"""

import mmap
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshlm.protocol.edges.kv import PageMemory
from meshlm.workers.kv.pages import BadMemory, KVPages, OtherMemory

LOOK_S = 1.0  # from one look at the processes to the next


@dataclass(slots=True, eq=False)
class Mapped:
    """A file as it was when it was mapped. Its holder never makes it shorter (SharedBytes seals it): a page that is gone would end the
    process that reads it."""

    file: mmap.mmap
    identity: tuple[int, int]  # of the file: another one may have come to its path
    handle: bytes
    opened: OtherMemory
    num_users: int = 0  # copies that use it
    is_kept: bool = True  # else it is closed behind the last of them

    def is_at(self, memory: PageMemory) -> bool:
        """Whether it is what `memory` names, with all of its bytes."""
        return _identity(memory.path) == self.identity and memory.handle == self.handle and self.is_whole()

    def is_whole(self) -> bool:
        """Whether the file still has all of its bytes."""
        return self.file.size() >= len(self.file)


class Mappings:
    """The files that are mapped now, by path and by whether they may be written."""

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self._mapped: dict[tuple[str, bool], Mapped] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    @contextmanager
    def use(self, memory: PageMemory, *, writes: bool) -> Iterator[Mapped]:
        """The memory, opened until the end of this context at least. BadMemory."""
        with self._lock:
            mapped = self._find(memory, (memory.path, writes or self._pages.pins))
            mapped.num_users += 1
        try:
            yield mapped
        finally:
            with self._lock:
                mapped.num_users -= 1
                _close_unused(mapped)

    def _find(self, memory: PageMemory, key: tuple[str, bool]) -> Mapped:
        try:
            found = self._mapped.get(key)
            if found is not None and found.is_at(memory):
                return found
            self._close(key)
            file, identity = _map(*key)
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise BadMemory(f"{memory.path}: {text}") from None
        self._mapped[key] = found = Mapped(file, identity, memory.handle, self._pages.open(memory, file))
        return found

    def close_those_gone(self) -> None:
        """Give up those whose process is gone, or has another file there."""
        with self._lock:
            for path, writes in list(self._mapped):
                try:
                    is_there = _identity(path) == self._mapped[path, writes].identity
                except OSError:
                    is_there = False
                if not is_there:
                    self._close((path, writes))

    def close(self) -> None:
        """Give up all: what a GPU knows of memory has to go before the memory does."""
        with self._lock:
            for key in list(self._mapped):
                self._close(key)

    def _close(self, key: tuple[str, bool]) -> None:
        if (mapped := self._mapped.pop(key, None)) is not None:
            mapped.is_kept = False
            _close_unused(mapped)


def _close_unused(mapped: Mapped) -> None:
    if not mapped.is_kept and not mapped.num_users:
        mapped.opened.close()


def _identity(path: str) -> tuple[int, int]:
    """OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _map(path: str, writes: bool) -> tuple[mmap.mmap, tuple[int, int]]:
    """The file, and its identity. OSError, ValueError."""
    descriptor = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("no file that can be mapped")
        if not found.st_size:
            raise ValueError("an empty file")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        return mmap.mmap(descriptor, found.st_size, mmap.MAP_SHARED, access), (found.st_dev, found.st_ino)
    finally:
        os.close(descriptor)
