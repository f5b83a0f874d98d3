"""What a process needs only while it starts does not stay with it."""

import os
from pathlib import Path

from meshlm.runtime.process.entry import give_back_memory

PIECE, COUNT = 4096, 10_000


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_freed_memory_goes_back_to_the_system() -> None:
    """Behind what stays, the C library would keep it."""
    pieces = [bytes(PIECE) for _ in range(COUNT)]
    last = bytes(PIECE)
    pieces.clear()
    before = rss()
    give_back_memory()
    assert before - rss() > PIECE * COUNT // 2
    assert len(last) == PIECE
