"""The threads of the second tier: several read, one writes, deletes and lists, so that a list is of what was written before it."""

import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from meshlm.store.disk.content import BadFile
from meshlm.store.disk.events import (
    DeleteFile,
    DiskEffect,
    DiskEvent,
    FileRead,
    FileWritten,
    Listed,
    ListFiles,
    ReadFile,
    WriteFile,
)

READERS = 4


class Files(Protocol):
    """Where the files are: folder.py, objects.py. All raise OSError; any thread may call them."""

    def write(self, key: bytes, pages: Sequence[memoryview]) -> int: ...
    def read(self, key: bytes, pages: Sequence[memoryview]) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def list(self) -> Listed: ...


class DiskThreads:
    """`memory` has the slots. `done` is called in a thread."""

    def __init__(self, files: Files, memory: mmap.mmap, done: Callable[[DiskEvent], None]) -> None:
        self._files, self._memory, self._done = files, memoryview(memory), done
        self._readers = ThreadPoolExecutor(READERS, "read")
        self._writer = ThreadPoolExecutor(1, "write")

    def do(self, effect: DiskEffect) -> None:
        """Begins it."""
        match effect:
            case ReadFile():
                self._readers.submit(self._read, effect)
            case WriteFile():
                self._writer.submit(self._write, effect)
            case DeleteFile():
                self._writer.submit(self._delete, effect.key)
            case ListFiles():
                self._writer.submit(self._list)

    def close(self) -> None:
        """What has not begun is left."""
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)

    def _pages(self, effect: ReadFile | WriteFile) -> list[memoryview]:
        size = effect.slot_bytes
        return [self._memory[slot * size : (slot + 1) * size] for slot in effect.slots]

    def _read(self, effect: ReadFile) -> None:
        begin = time.monotonic()
        try:
            self._files.read(effect.key, self._pages(effect))
            self._done(FileRead(effect.key, time.monotonic() - begin))
        except BadFile as error:
            self._delete(effect.key)
            self._done(FileRead(effect.key, failure=str(error), is_bad=True))
        except FileNotFoundError:
            self._done(FileRead(effect.key, failure="gone", is_gone=True))
        except OSError as error:
            self._done(FileRead(effect.key, failure=_why(error)))

    def _write(self, effect: WriteFile) -> None:
        try:
            self._done(FileWritten(effect.key, self._files.write(effect.key, self._pages(effect))))
        except OSError as error:
            self._done(FileWritten(effect.key, failure=_why(error)))

    def _delete(self, key: bytes) -> None:
        try:
            self._files.delete(key)
        except OSError:
            return  # it is found again by the next list

    def _list(self) -> None:
        try:
            self._done(self._files.list())
        except OSError as error:
            self._done(Listed(failure=_why(error)))


def _why(error: OSError) -> str:
    return error.strerror or str(error)
