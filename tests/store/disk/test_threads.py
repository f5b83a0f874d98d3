"""The threads: pages go from slots to files and back, what is spoilt is deleted, and errors are said."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
from store_bench import NAMESPACE, key

from meshlm.store.disk.content import name_of
from meshlm.store.disk.events import (
    DeleteFile,
    DiskEvent,
    FileRead,
    FileWritten,
    Listed,
    ListFiles,
    ReadFile,
    WriteFile,
)
from meshlm.store.disk.folder import Folder
from meshlm.store.disk.threads import DiskThreads

KEY, SIZE = NAMESPACE + key(1), 8
LIMIT_S = 30


class Bench:
    """Four slots, a folder, and what the threads say."""

    def __init__(self, base: Path) -> None:
        self.memory, self.base = mmap.mmap(-1, 4 * SIZE), base
        self.memory[:] = b"".join(bytes([65 + slot]) * SIZE for slot in range(4))
        self._said: Queue[DiskEvent] = Queue()
        self.threads = DiskThreads(Folder(base), self.memory, self._said.put)

    def does(self, effect: ReadFile | WriteFile | ListFiles) -> DiskEvent:
        self.threads.do(effect)
        return self._said.get(timeout=LIMIT_S)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path / "kv")
    yield found
    found.threads.close()


def test_pages_go_to_a_file_and_into_other_slots(bench: Bench) -> None:
    written = bench.does(WriteFile(KEY, (3, 0), SIZE))
    assert isinstance(written, FileWritten)
    assert not written.failure
    assert bench.does(ListFiles()) == Listed({KEY: written.num_bytes}, bench.does(ListFiles()).free_bytes)  # type: ignore[union-attr]
    read = bench.does(ReadFile(KEY, (1, 2), SIZE))
    assert isinstance(read, FileRead)
    assert not read.failure
    assert bytes(bench.memory[:]) == b"A" * 8 + b"D" * 8 + b"A" * 8 + b"D" * 8
    bench.threads.do(DeleteFile(KEY))
    assert bench.does(ListFiles()).sizes == {}  # type: ignore[union-attr]
    assert bench.does(ReadFile(KEY, (1,), SIZE)) == FileRead(KEY, failure="gone", is_gone=True)


def test_a_spoilt_file_is_deleted(bench: Bench) -> None:
    bench.does(WriteFile(KEY, (0,), SIZE))
    file = bench.base / name_of(KEY)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert bench.does(ReadFile(KEY, (1,), SIZE)) == FileRead(KEY, failure="sum", is_bad=True)
    assert not file.exists()


def test_errors_are_said(bench: Bench) -> None:
    bench.base.write_text("a file, no folder")
    assert bench.does(WriteFile(KEY, (0,), SIZE)) == FileWritten(KEY, failure="File exists")
    assert bench.does(ReadFile(KEY, (0,), SIZE)) == FileRead(KEY, failure="Not a directory")
    assert bench.does(ListFiles()) == Listed(failure="Not a directory")
