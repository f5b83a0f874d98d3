"""KV pages of a GPU: saved to the host and loaded with the same bytes, beside steps and captures of graphs; and read by others."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import exporting_process
from engine_driver import Driver, engine, prompts_of
from near_transformers import DEEPSEEK, transformers_model
from page_copies import Answers, copy_of
from waiting import until

from meshlm.protocol.edges.kv import PageMemory, Segment
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.sleeping import KV_CACHE
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.kv import mover, pinned
from meshlm.workers.kv.device_pages import DevicePages
from meshlm.workers.kv.mover import Mover
from meshlm.workers.kv.pages import KVPages, SharedBytes
from meshlm.workers.kv.pinned import PinnedMemory

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
NUM_PAGES = 40


class Store:
    """The slots of a store: the pages of several workers side by side, of which this one is the last."""

    def __init__(self, page_bytes: int, num_lines: int, num_workers: int = 1) -> None:
        slot = num_workers * page_bytes
        self._bytes = SharedBytes(num_lines * slot)
        segment = Segment(slot - page_bytes, slot, page_bytes)
        self.memory = PageMemory(self._bytes.path, num_lines, (segment,))
        self.lines = self._bytes.array.reshape(num_lines, slot)[:, slot - page_bytes :]


@contextlib.contextmanager
def moving(pages: KVPages) -> Iterator[Mover]:
    made = Mover(pages, pytest.fail)
    try:
        yield made
    finally:  # what it has pinned must not stay when the memory is gone
        made.close()
        until(lambda: not len(made._mappings), limit_s=10)


def move(
    made: Mover, other: PageMemory | Sequence[Any], pages: Sequence[int], lines: Sequence[int], **others: Any
) -> None:
    answers = Answers()
    made.submit(copy_of(other, pages, lines, done=answers, **others))
    answer = answers.get()
    assert (answer.num_pages, answer.message) == (len(pages), "")


def pages_at(columns: Sequence[torch.Tensor], pages: Sequence[int]) -> np.ndarray[Any, Any]:
    """uint8 [pages, page_bytes]."""
    torch.cuda.synchronize()
    return torch.cat([column[list(pages)] for column in columns], 1).cpu().numpy()


@pytest.mark.parametrize("in_a_row", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(("num_columns", "width"), [(64, 32768), (6, 1040), (27, 18432), (1, 20 << 20)])
def test_what_was_saved_is_loaded_elsewhere(
    num_columns: int, width: int, num_workers: int, in_a_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of Llama-8B, of odd sizes, of latents, and larger than a lane; pinned in stretches that cut through pages."""
    monkeypatch.setattr(pinned, "STRETCH", 3 << 20)
    torch.manual_seed(0)
    count = 8 if width > 1 << 20 else NUM_PAGES
    columns = list(torch.randint(256, (num_columns, count, width), dtype=torch.uint8, device="cuda"))
    pages, store = DevicePages(columns), Store(num_columns * width, count + 20, num_workers)
    dice = np.random.default_rng(0)
    lines = list(range(9, 9 + count)) if in_a_row else dice.permutation(count + 20)[:count].tolist()
    before = pages_at(columns, range(count))
    with moving(pages) as made:
        move(made, store.memory, range(count), lines, is_load=False)
        assert (store.lines[lines] == before).all()
        for column in columns:
            column.zero_()
        elsewhere = dice.permutation(count).tolist()
        move(made, store.memory, elsewhere, lines, after=pages.mark())
        assert (pages_at(columns, elsewhere) == before).all()
        (there,) = made._mappings._mapped.values()
        assert isinstance(there.opened, PinnedMemory)
        assert there.opened._stretches, "nothing was pinned"
        assert all(there.opened._stretches.values()), "the driver refuses to pin memory of another process"


def test_loads_and_saves_go_side_by_side() -> None:
    """In turns of many small copies both ways at once, no byte goes to the wrong page."""
    columns = list(torch.randint(256, (27, NUM_PAGES, 18432), dtype=torch.uint8, device="cuda"))
    pages, store = DevicePages(columns), Store(27 * 18432, NUM_PAGES)
    half, dice = NUM_PAGES // 2, np.random.default_rng(0)
    with moving(pages) as made:
        for _ in range(10):
            store.lines[:half] = content = dice.integers(0, 256, store.lines[:half].shape, np.uint8)
            before, answers = pages_at(columns, range(half, NUM_PAGES)), Answers()
            for nth in range(half):
                made.submit(copy_of(store.memory, [nth], [nth], done=answers))
                made.submit(copy_of(store.memory, [half + nth], [half + nth], is_load=False, done=answers))
            assert all(answers.get().num_pages == 1 for _ in range(2 * half))
            assert (pages_at(columns, range(half)) == content).all()
            assert (store.lines[half:] == before).all()


def test_buffers_of_this_process_need_not_be_pinned() -> None:
    """As connectors have them."""
    columns = list(torch.randint(256, (6, NUM_PAGES, 4096), dtype=torch.uint8, device="cuda"))
    pages = DevicePages(columns)
    buffers = np.zeros((NUM_PAGES, 6 * 4096), np.uint8)
    before = pages_at(columns, range(NUM_PAGES))
    with moving(pages) as made:
        move(made, [buffers], range(NUM_PAGES), range(NUM_PAGES), is_load=False)
        assert (buffers == before).all()
        move(made, [buffers], range(NUM_PAGES)[::-1], range(NUM_PAGES))
        assert (pages_at(columns, range(NUM_PAGES)[::-1]) == before).all()


def test_a_load_is_behind_the_steps_before_it() -> None:
    """They may still write the pages that it fills."""
    columns = list(torch.zeros(6, NUM_PAGES, 4096, dtype=torch.uint8, device="cuda"))
    pages, store = DevicePages(columns), Store(6 * 4096, NUM_PAGES)
    store.lines[:] = 5
    with moving(pages) as made:
        move(made, store.memory, range(NUM_PAGES), range(NUM_PAGES))
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        for column in columns:
            column.fill_(1)
        begun = time.monotonic()
        move(made, store.memory, range(NUM_PAGES), range(NUM_PAGES), after=pages.mark())
        assert time.monotonic() - begun > 0.05, "it has not waited"
        assert (pages_at(columns, range(NUM_PAGES)) == 5).all()


# --- engines ---

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("", {}),
    "full, FP8": ("", {"kv_cache_dtype": "fp8"}),
    "windowed": ("gemma3", {}),
    "latent": (next(iter(DEEPSEEK)), {}),
}


def made_for(case: str, folder: Path, **settings: Any) -> ModelEngine:
    name, own = CASES[case]
    if name:
        transformers_model(name, folder)
        own = {**own, "load_format": "auto"}
    return engine(folder, kv_offloading_size=0.01, cudagraph_capture="start", **{**own, **settings})


def columns_of(made: ModelEngine) -> Sequence[torch.Tensor]:
    assert isinstance(made.pages, DevicePages)
    return made.pages.columns


def spoil(made: ModelEngine, count: int) -> None:
    """All their numbers are NaN."""
    for column in columns_of(made):
        column[:count].fill_(255)


def logits(made: ModelEngine, *, moves: bool) -> list[torch.Tensor]:
    """Prompts, decodes, and decodes behind what was moved away and came back."""
    driver = Driver(made, prompts_of([333, 140]), GREEDY)
    driver.step({1: 140})
    driver.step({0: 200, 1: 1})
    driver.step({0: 133, 1: 1})
    driver.step({0: 1, 1: 1})
    if moves:
        count = 2 * (1024 // made.rows.block_size) * made.rows.num_groups
        assert made.pages is not None
        store = Store(made.pages.page_bytes, count)
        before = pages_at(columns_of(made), range(count))
        with moving(made.pages) as mover_of_it:
            move(mover_of_it, store.memory, range(count), range(count)[::-1], is_load=False)
            spoil(made, count)
            move(mover_of_it, store.memory, range(count), range(count)[::-1], after=made.pages.mark())
        assert (pages_at(columns_of(made), range(count)) == before).all()
    found = [driver.step({0: 1, 1: 1}) for _ in range(6)]
    made.reset()
    return found


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_without_moving(case: str, mode: str, tmp_path: Path) -> None:
    """To the last bit."""
    made = made_for(case, tmp_path, cudagraph_mode=mode)
    stayed = logits(made, moves=False)
    assert all(torch.equal(*pair) for pair in zip(logits(made, moves=True), stayed, strict=True))


def test_pages_move_beside_steps_and_while_graphs_are_captured(tmp_path: Path) -> None:
    """Pages that no row has are copied back and forth all the while; the rows' logits and the pages' bytes stay what they are."""
    made = engine(tmp_path, kv_offloading_size=0.01, cudagraph_mode="FULL_AND_PIECEWISE")
    pages = made.pages
    assert isinstance(pages, DevicePages)
    first, count = pages.num_pages - 400, 200
    for column in columns_of(made):
        column[first:].random_()
    before = pages_at(columns_of(made), range(first, first + count))
    store, over, num_copies = Store(pages.page_bytes, count), threading.Event(), [0]

    def decodes(*, captures: bool = False) -> list[torch.Tensor]:
        driver = Driver(made, prompts_of([100, 40, 7]), GREEDY)
        found = [driver.step({0: 100, 1: 40, 2: 7})]
        for _ in range(12):
            if captures:
                made.idle()
            found.append(driver.step({0: 1, 1: 1, 2: 1}))
        made.reset()
        return found

    def copies() -> None:
        here, there = first, first + count
        with moving(pages) as made_mover:
            while not over.is_set():
                move(made_mover, store.memory, range(here, here + count), range(count), is_load=False)
                move(made_mover, store.memory, range(there, there + count), range(count))
                here, there = there, here
                num_copies[0] += 1

    thread = threading.Thread(target=copies)
    thread.start()
    try:
        while not made.graphs.complete:
            decodes(captures=True)
        found = decodes()
    finally:
        over.set()
        thread.join()
    assert num_copies[0] > 1
    for begin in (first, first + count):
        assert (pages_at(columns_of(made), range(begin, begin + count)) == before).all()
    assert all(torch.equal(*pair) for pair in zip(found, decodes(), strict=True))


def test_pages_move_after_a_sleep(tmp_path: Path) -> None:
    """Which gives the tensors other memory."""
    made = made_for("full", tmp_path)
    assert made.pages is not None
    store, some = Store(made.pages.page_bytes, NUM_PAGES), range(500, 500 + NUM_PAGES)
    store.lines[:] = np.random.default_rng(0).integers(0, 256, store.lines.shape, np.uint8)
    with moving(made.pages) as made_mover:
        move(made_mover, store.memory, some, range(NUM_PAGES))
        made.be_without((KV_CACHE,))
        others = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
        made.be_without(())
        assert not pages_at(columns_of(made), some).any()
        move(made_mover, store.memory, some, range(NUM_PAGES))
    assert (pages_at(columns_of(made), some) == store.lines).all()
    assert not others.any()


# --- another process's ---


@pytest.fixture
def exporting() -> "Iterator[tuple[subprocess.Popen[str], PageMemory]]":
    """A process that has pages on GPU 0, and where they lie."""
    command = [sys.executable, "-P", exporting_process.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, msgspec.json.decode(process.stdout.readline(), type=PageMemory)
        process.kill()


@pytest.mark.parametrize("gpu", range(2))
def test_pages_of_another_process_are_read(
    gpu: int, exporting: "tuple[subprocess.Popen[str], PageMemory]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same GPU and by another; and its memory is given up when it dies."""
    if gpu >= torch.cuda.device_count():
        pytest.skip("needs several CUDA devices")
    monkeypatch.setattr(mover, "LOOK_S", 0.1)
    process, memory = exporting
    device = torch.device("cuda", gpu)
    width, num_columns = exporting_process.WIDTH, exporting_process.NUM_COLUMNS
    with torch.cuda.device(device):
        columns = list(torch.zeros(num_columns, NUM_PAGES * 8, width, dtype=torch.uint8, device=device))
        pages = DevicePages(columns)
        here, there = list(range(300)), np.random.default_rng(0).permutation(300).tolist()
        with moving(pages) as made:
            for _ in range(2):  # opened once
                move(made, memory, here, there)
            wanted = torch.cat([column[there] for column in exporting_process.content()], 1).numpy()
            assert (pages_at(columns, here) == wanted).all()
            process.send_signal(signal.SIGKILL)
            process.wait()
            until(lambda: not len(made._mappings), limit_s=10)
            answers = Answers()
            made.submit(copy_of(memory, here, there, done=answers))
            assert answers.get().message == f"{memory.path}: {os.strerror(2)}"


def test_columns_that_are_unlike_are_refused(exporting: "tuple[subprocess.Popen[str], PageMemory]") -> None:
    _, memory = exporting
    width = exporting_process.WIDTH * exporting_process.NUM_COLUMNS // 2
    pages = DevicePages(list(torch.zeros(2, 4, width, dtype=torch.uint8, device="cuda")))
    with moving(pages) as made:
        answers = Answers()
        made.submit(copy_of(memory, [0], [0], done=answers))
        assert "for a page, and those here" in answers.get().message
