"""Pages of a GPU, where the host stands in for it: the driver's copies are memmove, a stream does at once what it is given.

That the bytes are right on a GPU, in streams of their own, is tests/workers/cuda/test_device_pages.py's to hold.
"""

import contextlib
import ctypes
import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from page_copies import Answers, copied, copy_of
from waiting import until

from meshlm.protocol.edges.kv import PageMemory, Segment
from meshlm.workers.cuda import driver
from meshlm.workers.kv import device_pages, mover, peer_memory, pinned
from meshlm.workers.kv.mover import Mover
from meshlm.workers.kv.pages import SharedBytes

if torch.cuda.is_available():
    pytest.skip("there is a GPU", allow_module_level=True)

NUM_PAGES, NUM_COLUMNS, WIDTH = 20, 6, 1040
PAGE = NUM_COLUMNS * WIDTH
Pinned = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """The stand-in; what is pinned: addresses and bytes."""
    found: Pinned = []

    def copy(target: int, source: int, num_bytes: int, stream: int, *, is_pinned: bool) -> None:
        ctypes.memmove(target, source, num_bytes)

    nothing = SimpleNamespace(record=lambda *stream: None, synchronize=lambda: None)
    stream = SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
    monkeypatch.setattr(torch, "empty", functools.partial(_empty, torch.empty))
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: nothing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(driver, "use", lambda device: None)
    monkeypatch.setattr(driver, "to_device", copy)
    monkeypatch.setattr(driver, "to_host", copy)
    monkeypatch.setattr(driver, "register", lambda address, num_bytes: found.append((address, num_bytes)))
    monkeypatch.setattr(driver, "unregister", lambda address: found.remove(_of(found, address)))
    monkeypatch.setattr(device_pages, "LANE_BYTES", 6 * PAGE)
    monkeypatch.setattr(pinned, "STRETCH", 3 * 4096)
    return found


def _empty(empty: Any, *sizes: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    found: torch.Tensor = empty(*sizes, **options)
    return found


def _of(found: Pinned, address: int) -> tuple[int, int]:
    return next(one for one in found if one[0] == address)


def columns() -> list[torch.Tensor]:
    dice = np.random.default_rng(0)
    return [torch.from_numpy(dice.integers(0, 256, (NUM_PAGES, WIDTH), np.uint8)) for _ in range(NUM_COLUMNS)]


PLACES = {
    "of one worker": (Segment(0, PAGE, PAGE),),
    "of the second worker of two": (Segment(PAGE, 2 * PAGE, PAGE),),
    "in two segments": (Segment(0, 1000, 1000), Segment(100_000, PAGE - 1000, PAGE - 1000)),
}


@pytest.mark.parametrize("in_a_row", [True, False])
@pytest.mark.parametrize("where", PLACES)
def test_pages_go_and_come(where: str, in_a_row: bool, registered: Pinned) -> None:
    shared, dice = SharedBytes(2 * 50 * PAGE), np.random.default_rng(1)
    memory = PageMemory(shared.path, 50, PLACES[where])
    own = columns()
    before = torch.cat(own, 1).numpy()
    pages, answers = device_pages.DevicePages(own), Answers()
    lines = list(range(7, 7 + NUM_PAGES)) if in_a_row else dice.permutation(50)[:NUM_PAGES].tolist()
    moving = Mover(pages, pytest.fail)
    moving.submit(copy_of(memory, range(NUM_PAGES), lines, is_load=False, done=answers))
    assert answers.get()[::2] == (NUM_PAGES, "")
    for column in own:
        column.zero_()
    elsewhere = dice.permutation(NUM_PAGES)
    moving.submit(copy_of(memory, elsewhere.tolist(), lines, after=pages.mark(), done=answers))
    assert answers.get()[::2] == (NUM_PAGES, "")
    assert (torch.cat(own, 1).numpy()[elsewhere] == before).all()
    assert len(set(registered)) == len(registered) > 1
    assert sum(num_bytes for _, num_bytes in registered) <= len(shared.array)
    moving.close()
    until(lambda: not registered)  # or the GPU would know memory that is not there any more


def test_what_is_pinned_is_let_go_with_the_process_that_had_it(
    registered: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "LOOK_S", 0.05)
    shared, answers = SharedBytes(50 * PAGE), Answers()
    memory = PageMemory(shared.path, 50, PLACES["of one worker"])
    moving = Mover(device_pages.DevicePages(columns()), pytest.fail)
    moving.submit(copy_of(memory, [3], [49], is_load=False, done=answers))
    assert answers.get().num_pages == 1
    assert registered
    del shared
    moving.submit(copy_of(memory, [3], [49], is_load=False, done=answers))
    assert answers.get().message.endswith("No such file or directory")
    limit = time.monotonic() + 30
    while registered:
        assert time.monotonic() < limit
        moving.submit(copy_of([np.zeros((1, PAGE), np.uint8)], [3], [0], is_load=False, done=answers))
        answers.get()
    moving.close()


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, num_bytes: int) -> None:
        raise driver.DriverError("CUDA error: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(driver, "register", refuse)
    shared, own = SharedBytes(50 * PAGE), columns()
    memory = PageMemory(shared.path, 50, PLACES["of one worker"])
    answer = copied(device_pages.DevicePages(own), copy_of(memory, [3, 4], [49, 0], is_load=False))
    assert answer == (2, 0, "")
    assert shared.array[:PAGE].tobytes() == b"".join(column[4].numpy().tobytes() for column in own)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PageMemory, torch.Tensor]]:
    """Pages of another GPU, [pages, columns, width], and where they lie."""
    there = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (NUM_COLUMNS, 300, WIDTH), np.uint8))
    monkeypatch.setattr(driver, "open_exported", lambda handle: there.data_ptr())
    monkeypatch.setattr(driver, "close_exported", lambda address: None)
    monkeypatch.setattr(driver, "export", lambda address: (b"handle", address))
    exported = peer_memory.Exported(list(there))
    yield exported.memory, there
    del exported  # and its file


def test_pages_of_a_peer_are_read(peer: tuple[PageMemory, torch.Tensor]) -> None:
    memory, there = peer
    own = list(torch.zeros(NUM_COLUMNS, 200, WIDTH, dtype=torch.uint8))
    lines = np.random.default_rng(0).permutation(300)[:200]
    assert copied(device_pages.DevicePages(own), copy_of(memory, range(200), lines.tolist())) == (200, 0, "")
    assert (torch.stack(own) == there[:, lines]).all()


def test_a_peer_whose_memory_cannot_be_opened_or_is_laid_out_otherwise_is_refused_by_name(
    peer: tuple[PageMemory, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _ = peer
    wide = list(torch.zeros(NUM_COLUMNS // 2, 4, 2 * WIDTH, dtype=torch.uint8))
    message = copied(device_pages.DevicePages(wide), copy_of(memory, [0], [0])).message
    assert message == f"{memory.path}: its columns have {{{WIDTH}}} bytes for a page, and those here {2 * WIDTH}"

    def refuse(handle: bytes) -> int:
        raise driver.DriverError("CUDA error: cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    monkeypatch.setattr(driver, "open_exported", refuse)
    message = copied(device_pages.DevicePages(columns()), copy_of(memory, [0], [0])).message
    assert message == f"{memory.path}: CUDA error: cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
