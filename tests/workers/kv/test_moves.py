"""A worker's pages in its messages: facts in WorkerReady, moves in order with plans and sessions, and a namespace that says what bytes
mean."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from fake_oracle import expected_token
from fake_steps import new, plan
from msgspec.structs import replace
from tiny_models import resolved_of, spec_of
from worker_meshes import WorkerMesh

from meshlm.protocol.config import CacheConfig, KVTransferConfig, MeshConfig, ParallelConfig, WorkerConfig
from meshlm.protocol.edges.kv import NOT_HERE, FindPages, MovePages, PageMemory, PagesFound, PagesMoved, Segment
from meshlm.protocol.edges.step import Reset, StepResult, WorkerReady
from meshlm.protocol.kv import FullAttention, SlidingWindow
from meshlm.protocol.operations import CallWorkers, Operation, OperationDone, OperationId
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.engine import EngineFacts
from meshlm.workers.io import WorkerApp
from meshlm.workers.kv import connector_thread
from meshlm.workers.kv.moves import digest, namespace_of
from meshlm.workers.kv.pages import SharedBytes

VOCAB = 1000
SPEC = spec_of(vocab_size=VOCAB, hidden_size=4, head_dim=4, max_position_embeddings=256)
SHARES = KVTransferConfig(dp_roles="prefill:1,decode:1", num_prefill_ranks=1, fingerprint="f")
SCHEDULER = Identity(Role.SCHEDULER)
TOKENS = list(range(20, 45))
PAGE = 64
T = TypeVar("T")


def config_of(kv_transfer: KVTransferConfig, **changes: Any) -> MeshConfig:
    parts = {"cache": CacheConfig(block_size=8), "resolved": resolved_of(SPEC, device="fake"), **changes}
    return MeshConfig(kv_transfer=kv_transfer, **parts)


class Worker:
    """A worker of --device fake, and what it says."""

    def __init__(self, kv_transfer: KVTransferConfig, step_ms: float = 0.0) -> None:
        config = config_of(kv_transfer, worker=WorkerConfig(fake_step_ms=step_ms))
        self.app, self.mesh = WorkerApp(), WorkerMesh(config)
        self.others: list[object] = []

    async def begin(self, session: int) -> WorkerReady:
        self.tell(Reset(session))
        return await self.hear(WorkerReady)

    async def start(self) -> WorkerReady:
        await self.app.start(self.mesh)  # type: ignore[arg-type]
        return await self.begin(1)

    def tell(self, message: Any) -> None:
        self.app.on_message(SCHEDULER, message)

    async def hear(self, kind: type[T]) -> T:
        """Its next word of this kind; its threads say others before or after it, as they will."""
        for said in self.others:
            if isinstance(said, kind):
                self.others.remove(said)
                return said
        while not isinstance(said := await asyncio.wait_for(self.mesh.said.get(), 30), kind):
            self.others.append(said)
        return said


async def test_a_move_is_behind_the_plans_before_it() -> None:
    one, other = Worker(SHARES), Worker(SHARES)
    ready, _ = await one.start(), await other.start()
    assert ready.page_bytes == PAGE
    assert ready.pages is not None
    one.tell(plan([0], [0], [25], [new(0, TOKENS, [5, 2, 7, 1])]))
    await one.hear(StepResult)  # what is saved is of steps whose results are back
    shared = SharedBytes(4 * PAGE)
    store = PageMemory(shared.path, 4, (Segment(0, PAGE, PAGE),))
    one.tell(MovePages(1, 11, False, pack_i32([5, 2, 7]), pack_i32([3, 0, 1]), store))
    saved = await one.hear(PagesMoved)
    assert (saved.session, saved.number, saved.failed, saved.message) == (1, 11, b"", "")
    assert saved.num_bytes == 3 * PAGE
    assert not shared.array[2 * PAGE : 3 * PAGE].any()
    other.tell(MovePages(1, 12, True, pack_i32([8, 9, 4]), pack_i32([3, 0, 1]), store))
    other.tell(MovePages(1, 13, True, pack_i32([6]), pack_i32([5]), ready.pages))  # as another rank's
    assert (await other.hear(PagesMoved)).failed == b""
    assert (await other.hear(PagesMoved)).failed == b""
    other.tell(plan([0], [24], [1], [new(0, TOKENS, [8, 9, 4, 3])]))
    assert ints((await other.hear(StepResult)).token_ids) == [expected_token(TOKENS, VOCAB)]
    other.tell(plan([1], [8], [1], [new(1, TOKENS[:9], [6, 10])]))
    assert ints((await other.hear(StepResult)).token_ids) == [expected_token(TOKENS[:9], VOCAB)]
    await one.app.stop()
    await other.app.stop()


async def test_a_move_of_an_earlier_session_copies_nothing() -> None:
    worker = Worker(SHARES, 300.0)
    await worker.start()
    shared = SharedBytes(PAGE)
    store = PageMemory(shared.path, 1, (Segment(0, PAGE, PAGE),))
    shared.array[:] = 7
    worker.tell(plan([0], [0], [9], [new(0, TOKENS[:9], [6, 2])]))
    worker.tell(MovePages(1, 11, True, pack_i32([5]), pack_i32([0]), store))
    worker.tell(Reset(2))  # both stand behind the step
    moved = await worker.hear(PagesMoved)
    assert (moved.session, ints(moved.failed), moved.message) == (1, [0], "its session has ended")
    await worker.hear(WorkerReady)
    worker.tell(MovePages(2, 12, False, pack_i32([5]), pack_i32([0]), store))
    assert (await worker.hear(PagesMoved)).failed == b""
    assert not shared.array.any(), "the page was written for the session before"
    await worker.app.stop()


async def test_what_cannot_be_moved_is_told_by_name() -> None:
    worker = Worker(KVTransferConfig(kv_offloading_size=1.0, fingerprint="f"))
    ready = await worker.start()
    assert (ready.page_bytes, ready.pages) == (PAGE, None), "nobody of other ranks reads them"
    memory = PageMemory("/nowhere", 1, (Segment(0, PAGE, PAGE),))
    worker.tell(MovePages(1, 11, True, pack_i32([5, 6]), pack_i32([0, 0]), memory))
    moved = await worker.hear(PagesMoved)
    assert (ints(moved.failed), moved.num_bytes) == ([0, 1], 0)
    assert moved.message == "/nowhere: No such file or directory"
    for connector, message in (("gone", "there is no connector 'gone'"), ("", "neither memory nor connector")):
        worker.tell(MovePages(1, 12, True, pack_i32([5]), connector=connector, keys=b"k" * 32))
        assert (await worker.hear(PagesMoved)).message == message
    worker.tell(FindPages(3, b"", b"k" * 32, b"\x01", session=1, connector="gone"))
    assert await worker.hear(PagesFound) == PagesFound(3, b"", session=1)
    await worker.app.stop()


async def test_pages_that_stay_have_no_facts() -> None:
    worker = Worker(KVTransferConfig())
    ready = await worker.start()
    assert (ready.page_bytes, ready.namespace, ready.pages) == (0, b"", None)
    await worker.app.stop()


async def test_a_call_of_the_users_makes_equal_keys_mean_other_bytes() -> None:
    """Once for each operation, whatever became of it, as the scheduler reckons."""
    worker = Worker(SHARES)
    before = (await worker.start()).namespace
    assert before == namespace_of(worker.mesh.config, _facts(worker), "f")
    for name in ("a", "a", "b"):
        worker.tell(Operation(OperationId(name), CallWorkers("anything", b"{}")))
        assert (await worker.hear(OperationDone)).error
    assert (await worker.begin(2)).namespace == digest(digest(before + b"a") + b"b")
    await worker.app.stop()


def _facts(worker: Worker) -> EngineFacts:
    assert worker.app._engine is not None
    return worker.app._engine.facts


class Memory:
    """A connector that keeps pages in memory, by namespace."""

    kept: dict[bytes, dict[bytes, bytes]]

    def __init__(self, namespace: bytes, page_bytes: int, options: Any) -> None:
        self._kept = self.kept.setdefault(namespace, {})

    def find(self, keys: Any, params: Any) -> list[bool]:
        return [key in self._kept for key in keys]

    def load(self, keys: Any, pages: Any, params: Any) -> list[bool]:
        for key, page in zip(keys, pages, strict=True):
            page[:] = np.frombuffer(self._kept[key], np.uint8)
        return [True] * len(keys)

    def save(self, keys: Any, pages: Any) -> None:
        self._kept |= {key: page.tobytes() for key, page in zip(keys, pages, strict=True)}

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> KVTransferConfig:
    monkeypatch.setattr(Memory, "kept", {}, raising=False)
    monkeypatch.setattr(connector_thread, "_makers", {"memory": Memory})
    return replace(SHARES, connectors=("memory",))


async def test_a_connector_has_the_pages_of_a_worker(connected: KVTransferConfig) -> None:
    worker, key = Worker(connected), b"k" * 32
    before = (await worker.start()).namespace
    worker.tell(plan([0], [0], [25], [new(0, TOKENS, [5, 2, 7, 1])]))
    await worker.hear(StepResult)
    find = FindPages(3, b"", b"n" * 32 + key, b"\x01\x01", session=1, connector="memory")
    worker.tell(find)
    assert (await worker.hear(PagesFound)).pages == b""
    worker.tell(MovePages(1, 4, False, pack_i32([5]), connector="memory", keys=key))
    assert (await worker.hear(PagesMoved)).failed == b""
    worker.tell(find)
    assert await worker.hear(PagesFound) == PagesFound(3, pack_i32([NOT_HERE, 0]), session=1)
    worker.tell(MovePages(1, 5, True, pack_i32([9]), connector="memory", keys=key))
    assert (await worker.hear(PagesMoved)).failed == b""
    worker.tell(plan([1], [8], [1], [new(1, TOKENS[:9], [9, 10])]))
    assert ints((await worker.hear(StepResult)).token_ids) == [expected_token(TOKENS[:9], VOCAB)]
    assert list(Memory.kept) == [digest(before + bytes(4))], "of the rank's first worker"
    worker.tell(Operation(OperationId("a"), CallWorkers("anything", b"{}")))
    await worker.hear(OperationDone)
    worker.tell(find)
    assert (await worker.hear(PagesFound)).pages == b"", "weights may be others, and so is the namespace"
    assert len(Memory.kept) == 2
    await worker.app.stop()


async def test_a_connector_that_is_not_there_or_cannot_be_made_ends_the_start(
    connected: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(replace(connected, connectors=("other",)))
    with pytest.raises(ProcessFatal, match="--kv-transfer-config: no installed package has a connector other"):
        await worker.start()

    def broken(*arguments: object) -> Memory:
        raise ValueError("no folder\nat all")

    monkeypatch.setitem(connector_thread._makers, "memory", broken)
    with pytest.raises(ProcessFatal, match=r"--kv-transfer-config: connector memory: ValueError: no folder$"):
        await Worker(connected).start()


CHANGES: dict[str, Callable[[MeshConfig, EngineFacts], tuple[MeshConfig, EngineFacts, str]]] = {
    "fingerprint": lambda c, f: (c, f, "g"),
    "dtype of the cache": lambda c, f: (replace(c, cache=replace(c.cache, kv_cache_dtype="fp8")), f, "f"),
    "dtype of states": lambda c, f: (replace(c, cache=replace(c.cache, mamba_ssm_cache_dtype="float32")), f, "f"),
    "ranks": lambda c, f: (replace(c, parallel=ParallelConfig(tensor_parallel_size=2)), f, "f"),
    "stages": lambda c, f: (replace(c, parallel=ParallelConfig(pipeline_parallel_size=2)), f, "f"),
    "block size": lambda c, f: (c, replace(f, block_size=16), "f"),
    "groups": lambda c, f: (c, replace(f, kv_specs=(FullAttention(), SlidingWindow(8))), "f"),
}


def test_a_namespace_differs_by_all_that_decides_bytes_and_by_nothing_else() -> None:
    config = config_of(SHARES)
    facts = EngineFacts(100, 8, 4, VOCAB, {}, kv_specs=(FullAttention(), SlidingWindow(9)))
    same = namespace_of(config, facts, "f")
    others = replace(
        config, run=replace(config.run, run_dir="/elsewhere"), parallel=ParallelConfig(data_parallel_size=2)
    )
    assert namespace_of(others, replace(facts, num_blocks=7, max_num_seqs=2), "f") == same
    found = [namespace_of(*change(config, facts)) for change in CHANGES.values()]
    assert len({same, *found}) == 1 + len(CHANGES)
    assert len(same) == 16
    tp = CHANGES["ranks"](config, facts)
    cut = namespace_of(config, facts, "f", is_cut=True)
    assert cut == namespace_of(*tp, is_cut=True) != same
    others_cut = [
        namespace_of(*change(config, facts), is_cut=True) for name, change in CHANGES.items() if name != "ranks"
    ]
    assert len({cut, *others_cut}) == len(CHANGES)


def test_a_path_in_the_worker_s_name_is_this_process_s(tmp_path: Path) -> None:
    """Others open what it names while this process lives."""
    shared = SharedBytes(100)
    shared.array[3] = 9
    assert Path(shared.path).read_bytes() == bytes([0, 0, 0, 9]) + bytes(96)
