"""The store as a process: memory that others map, files behind it, and one line for a disk that fails."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from store_bench import NAMESPACE, S0, keys

from meshlm.protocol.config import KVTransferConfig, MeshConfig
from meshlm.protocol.counts import Counted
from meshlm.protocol.edges import kv
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Incarnation
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.process.timeline import Timeline
from meshlm.store.io import StoreApp

PAGE, LIMIT_S = 4096, 30


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, text: str, **fields: Any) -> None:
        self.lines.append(f"{text} {fields.get('reason', '')}".strip())

    def debug(self, *_: Any, **__: Any) -> None: ...


class Mesh:
    """What a store has of its Mesh."""

    def __init__(self, **settings: Any) -> None:
        self.config = MeshConfig(kv_transfer=KVTransferConfig(kv_offloading_size=2**-10, **settings))  # 1 MiB
        self.log, self.timeline = Log(), Timeline(Identity(S0.role))
        self.sent: asyncio.Queue[Struct] = asyncio.Queue()
        self.counts: Counted | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, to: Identity, message: Struct) -> None:
        if to == COORDINATOR:
            assert isinstance(message, Counted)
            self.counts = message
        else:
            self.sent.put_nowait(message)

    def incarnation_of(self, peer: Identity) -> Incarnation:
        return Incarnation(1)

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_later(delay_s, callback, *arguments)

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    async def answer(self) -> Any:
        return await asyncio.wait_for(self.sent.get(), LIMIT_S)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def mapped(memory: kv.PageMemory) -> mmap.mmap:
    with open(memory.path, "r+b") as file:
        return mmap.mmap(file.fileno(), memory.num_pages * PAGE)


def num_files(folder: Path) -> int:
    return len(list(folder.rglob("*.kv")))


class Bench:
    """A store, and a scheduler whose worker maps its memory."""

    def __init__(self, **settings: Any) -> None:
        self.app, self.mesh, self.number = StoreApp(), Mesh(**settings), 0
        self.memory: mmap.mmap | None = None

    async def begin(self) -> "Bench":
        await self.app.start(self.mesh)  # type: ignore[arg-type]
        self.app.on_message(S0, kv.OpenPages(NAMESPACE, (PAGE,)))
        opened = await self.mesh.answer()
        (memory,) = opened.memory
        self.memory = mapped(memory)
        return self

    async def stores(self, number: int, content: bytes) -> None:
        self.number += 1
        self.app.on_message(S0, kv.OfferPages(self.number, NAMESPACE, keys([number]), b"\1"))
        (slot,) = ints((await self.mesh.answer()).pages)
        assert self.memory is not None
        self.memory[slot * PAGE : (slot + 1) * PAGE] = content
        self.app.on_message(S0, kv.PagesStored(self.number, b"\1"))

    async def reads(self, number: int) -> bytes | None:
        """The page of a key; None where the store has not got it."""
        self.number += 1
        self.app.on_message(S0, kv.FindPages(self.number, NAMESPACE, keys([number]), b"\1"))
        if not (pages := ints((await self.mesh.answer()).pages)):
            return None
        assert self.memory is not None
        found = self.memory[pages[0] * PAGE : (pages[0] + 1) * PAGE]
        self.app.on_message(S0, kv.EndLease(self.number))
        assert (await self.mesh.answer()).valid
        return found

    async def end(self) -> None:
        await self.app.drain(0.0)
        await self.app.stop()


@pytest.fixture
async def plain() -> AsyncIterator[Bench]:
    found = await Bench().begin()
    yield found
    await found.end()


async def test_what_a_worker_writes_another_reads(plain: Bench) -> None:
    await plain.stores(1, b"x" * PAGE)
    assert await plain.reads(1) == b"x" * PAGE
    assert await plain.reads(2) is None
    assert plain.app.beat()[1] == "1 keys"
    await plain.mesh.until(lambda: plain.mesh.counts is not None)


async def test_a_lease_is_what_a_store_dies_with_in_hand(plain: Bench) -> None:
    assert plain.app.num_requests() == 0
    plain.app.on_message(S0, kv.OfferPages(1, NAMESPACE, keys([1]), b"\1"))
    assert plain.app.num_requests() == 1
    plain.app.on_message(S0, kv.PagesStored(1, b"\1"))
    assert plain.app.num_requests() == 0


async def test_the_memory_is_not_taken_before_it_is_written(plain: Bench) -> None:
    descriptor = plain.app._memory
    assert os.fstat(descriptor).st_size == 1 << 20
    assert os.fstat(descriptor).st_blocks == 0
    await plain.stores(1, b"x" * PAGE)
    assert os.fstat(descriptor).st_blocks == PAGE // 512


async def test_a_new_store_has_what_the_folder_has(tmp_path: Path) -> None:
    first = await Bench(kv_offloading_path=str(tmp_path / "kv")).begin()
    for number in range(20):
        await first.stores(number, bytes([number]) * PAGE)
    await first.end()
    assert num_files(tmp_path) == 20
    second = await Bench(kv_offloading_path=str(tmp_path / "kv")).begin()
    core = second.app._core
    assert core is not None
    assert core.disk is not None
    await second.mesh.until(lambda: core.disk is not None and len(core.disk.sizes) == 20)
    assert [await second.reads(number) for number in range(20)] == [bytes([number]) * PAGE for number in range(20)]
    await second.end()


async def test_a_disk_that_fails_is_one_line_and_one_when_it_works_again(tmp_path: Path) -> None:
    base = tmp_path / "kv"
    base.write_text("in the way")
    bench = await Bench(kv_offloading_path=str(base)).begin()
    await bench.mesh.until(lambda: len(bench.mesh.log.lines) == 1)
    assert bench.mesh.log.lines == ["the second tier pauses Not a directory"]
    await bench.stores(1, b"x" * PAGE)
    assert await bench.reads(1) == b"x" * PAGE, "the first tier goes on"
    base.unlink()
    disk = bench.app._core.disk  # type: ignore[union-attr]
    assert disk is not None
    disk._paused_until = 0.0
    await bench.mesh.until(lambda: len(bench.mesh.log.lines) == 2)
    assert bench.mesh.log.lines[1] == "the second tier works again"
    await bench.end()


async def test_a_url_without_its_package_ends_the_start() -> None:
    with pytest.raises(ProcessFatal, match="--kv-offloading-path nowhere://x: Protocol not known: nowhere"):
        await Bench(kv_offloading_path="nowhere://x").begin()
