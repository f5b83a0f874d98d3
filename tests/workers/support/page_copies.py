"""Copies of pages for tests: pages of numbers by chance, and the answers of a mover."""

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshlm.protocol.edges.kv import PageMemory
from meshlm.workers.kv.mover import Copied, Copy, Mover
from meshlm.workers.kv.pages import Column, HostPages, KVPages

LIMIT_S = 30


class Answers(queue.SimpleQueue[Any]):
    """What was said, in order."""

    def __call__(self, said: object) -> None:
        self.put(said)

    def get(self, block: bool = True, timeout: float | None = LIMIT_S) -> Any:
        return super().get(block, timeout)


def host_pages(num_pages: int, widths: Sequence[int]) -> tuple[HostPages, Callable[[int], bytes]]:
    """Pages of columns of these widths; and what gives the bytes of one."""
    dice = np.random.default_rng(0)
    columns = [dice.integers(0, 256, (num_pages, width), np.uint8) for width in widths]
    return HostPages(columns), lambda page: b"".join(column[page].tobytes() for column in columns)


def written(path: Path, size: int) -> str:
    """A file of zeros."""
    path.write_bytes(bytes(size))
    return str(path)


def copy_of(other: PageMemory | Sequence[Column], pages: Sequence[int], lines: Sequence[int], **others: Any) -> Copy:
    """A load of session 0, unless told otherwise."""
    values = {"session": 0, "is_load": True, "after": None, "deadline_ns": 0, "done": Answers(), **others}
    return Copy(pages=pages, lines=lines, other=other, **values)


def copied(pages: KVPages, copy: Copy) -> Copied:
    """What a mover made of one copy."""
    mover, answers = Mover(pages, pytest.fail), Answers()
    mover.submit(copy._replace(done=answers))
    found: Copied = answers.get()
    mover.close()
    return found._replace(duration_ns=0)
