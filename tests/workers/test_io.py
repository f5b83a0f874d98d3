"""The worker's threads: one that dies ends the process, in words."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from worker_meshes import WorkerMesh

from meshlm.protocol.config import Resolved
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.step import (
    ExtraReady,
    PrepareExtra,
    Reset,
    RowFailed,
    StepFailed,
    StepPlan,
    StepResult,
    WorkerReady,
    WorkerStats,
)
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.operations import (
    Operation,
    OperationDone,
    OperationId,
    Profile,
    RebalanceExperts,
    ResetPrefixCache,
)
from meshlm.protocol.wire.ids import ErrorKind, Identity, Role, StepId
from meshlm.runtime.errors import MessageTooLong
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers import io
from meshlm.workers.engine import EngineFacts, Pending
from meshlm.workers.operations import Operations
from meshlm.workers.output.grammars import GrammarRows, MatchersLost
from meshlm.workers.rows.extras.extra import RowExtras
from meshlm.workers.weights.versions import WorkerWeights


class Mesh(WorkerMesh):
    """Of --device fake; no frame holds the result of a step."""

    def __init__(self, smollm2: Path) -> None:
        super().__init__(resolve.resolve(flags.build({"model": str(smollm2), "device": "fake"}, None)))

    def send(self, to: Identity, message: object) -> None:
        if isinstance(message, StepResult):
            raise MessageTooLong(to, "StepResult", 101, 100)
        super().send(to, message)


class Grammars:
    """Compiles in no time but what it is told to wait for."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def compile(self, text: str) -> str:
        if text == "slow":
            assert self.released.wait(30)
        if text == "panic":
            raise BaseException("called `Option::unwrap()` on a `None` value")
        if text == "busy":
            raise MatchersLost("it was not done", by_grammar=False)
        return "no such rule" if text == "bad" else ""


class Engine:
    facts = EngineFacts(1, 16, 1, 100, {})

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure
        self.counts = GraphCounts()
        self.grammars = Grammars()
        self.extras = RowExtras[Any]((GrammarRows(cast(Any, self.grammars)),), 1)

    def reset(self) -> None:
        """It has no rows."""

    def graph_counts(self) -> GraphCounts:
        return self.counts

    def check_weights(self, resolved: Resolved) -> str:
        return ""

    def load_weights(self, resolved: Resolved) -> None: ...

    def sum_weights(self) -> str:
        return ""

    def rebalance(self) -> str:
        return "they stay"

    def step(self, plan: StepPlan, received_ns: int) -> Pending:
        raise NotImplementedError

    def idle(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return False


async def start(smollm2: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None) -> tuple[io.WorkerApp, Mesh]:
    monkeypatch.setattr(io, "make_engine", lambda *arguments: Engine(failure))
    app, mesh = io.WorkerApp(), Mesh(smollm2)
    await app.start(mesh)  # type: ignore[arg-type]
    return app, mesh


async def test_a_failure_in_idle_time_is_the_process_s_last_word(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, mesh = await start(smollm2, monkeypatch, ValueError("graphs\nand more"))
    assert await asyncio.wait_for(mesh.said.get(), 10) == "ValueError: graphs"
    await app.stop()


async def test_an_operation_is_answered_to_the_scheduler_in_order(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, mesh = await start(smollm2, monkeypatch, None)
    scheduler = Identity(Role.SCHEDULER, 0)
    app.on_message(scheduler, Operation(OperationId("a"), Profile(True)))
    app.on_message(scheduler, Reset(5))
    app.on_message(scheduler, Operation(OperationId("b"), ResetPrefixCache()))
    answer = await asyncio.wait_for(mesh.said.get(), 10)
    assert isinstance(answer, OperationDone)
    assert answer.id == "a"
    assert "--profiler-dir" in answer.error
    assert isinstance(await asyncio.wait_for(mesh.said.get(), 10), WorkerReady)
    assert await asyncio.wait_for(mesh.said.get(), 10) == OperationDone(OperationId("b"))
    await app.stop()


async def test_grammars_are_compiled_beside_the_steps(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow holds up neither others nor operations; each is answered, whatever becomes of it."""
    app, mesh = await start(smollm2, monkeypatch, None)
    scheduler, engine = Identity(Role.SCHEDULER, 0), app._engine
    for number, text in enumerate(("slow", "bad", "panic", "fine", "busy")):
        app.on_message(scheduler, PrepareExtra(5, number, Grammar(GrammarKind.COMPILED, text)))
    app.on_message(scheduler, Operation(OperationId("b"), ResetPrefixCache()))
    said = [await asyncio.wait_for(mesh.said.get(), 10) for _ in range(5)]
    assert OperationDone(OperationId("b")) in said
    answers = {one.number: one for one in said if isinstance(one, ExtraReady)}
    assert answers.keys() == {1, 2, 3, 4}
    assert (answers[1].failed, answers[3].failed) == (RowFailed("no such rule"), None)
    panic = answers[2].failed
    assert panic is not None
    assert "cannot be compiled" in panic.message
    assert answers[4].failed == RowFailed("it was not done; try again", ErrorKind.OVERLOADED)
    engine.grammars.released.set()  # type: ignore[union-attr]
    assert await asyncio.wait_for(mesh.said.get(), 10) == ExtraReady(5, 0)
    await app.stop()


async def test_what_a_trace_needs_is_imported_before_the_worker_is_ready(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch was imported by the first /start_profile of a fake device: it took no step meanwhile, and the request got no answer."""
    loaded: list[str] = []
    monkeypatch.setattr(io, "load_profiler", loaded.append)
    monkeypatch.setattr(io, "make_engine", lambda *arguments: Engine(None))
    app, mesh = io.WorkerApp(), Mesh(smollm2)
    settings: dict[str, object] = {"model": str(smollm2), "device": "fake", "profiler_dir": str(tmp_path)}
    mesh.config = resolve.resolve(flags.build(settings, None))
    await app.start(mesh)  # type: ignore[arg-type]
    assert loaded == [str(tmp_path)]
    await app.stop()


async def test_a_worker_that_is_asked_again_does_not_do_it_twice(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another worker of its rank was lost meanwhile: the trace that it has begun is the one that is meant."""
    mesh = Mesh(smollm2)
    mesh.config = resolve.resolve(
        flags.build({"model": str(smollm2), "device": "fake", "profiler_dir": str(tmp_path)}, None)
    )
    operations = Operations(mesh.config, mesh.identity, (Engine(None), WorkerWeights(mesh.config)))
    for _ in range(2):
        assert operations.do(Operation(OperationId("a"), Profile(True))) == OperationDone(OperationId("a"))
    assert "running already" in operations.do(Operation(OperationId("b"), Profile(True))).error
    stopped = operations.do(Operation(OperationId("c"), Profile(False)))
    assert stopped.paths == operations.do(Operation(OperationId("c"), Profile(False))).paths != ()


async def test_the_engine_says_whether_experts_move(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, mesh = await start(smollm2, monkeypatch, None)
    app.on_message(Identity(Role.SCHEDULER, 0), Operation(OperationId("a"), RebalanceExperts()))
    assert await asyncio.wait_for(mesh.said.get(), 10) == OperationDone(OperationId("a"), "they stay")
    await app.stop()


async def test_graph_counts_are_said_when_they_change(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again to a scheduler that begins anew."""
    app, mesh = await start(smollm2, monkeypatch, None)
    engine: Any = app._engine
    for counts in (GraphCounts({"decode": 3}, {"not_captured": 1}), GraphCounts({"decode": 4}, {"not_captured": 1})):
        engine.counts = counts
        assert await asyncio.wait_for(mesh.said.get(), 10) == WorkerStats(counts)
    app.on_message(Identity(Role.SCHEDULER, 0), Reset(5))
    assert isinstance(await asyncio.wait_for(mesh.said.get(), 10), WorkerReady)
    assert await asyncio.wait_for(mesh.said.get(), 10) == WorkerStats(engine.counts)
    await app.stop()


async def test_a_result_that_no_frame_holds_is_a_step_that_failed(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, mesh = await start(smollm2, monkeypatch, None)
    app._send(StepResult(5, StepId(7), b""))
    failed = await asyncio.wait_for(mesh.said.get(), 10)
    assert isinstance(failed, StepFailed)
    assert (failed.session, failed.step) == (5, 7)
    assert "too long for the mesh" in failed.message
    await app.stop()


async def test_a_failed_step_of_ranks_that_step_together_ends_the_process(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the middle of it: only a new incarnation of this worker makes them meet again."""
    app, mesh = await start(smollm2, monkeypatch, None)
    plan = StepPlan(5, StepId(7), b"", b"", b"", b"", 0)
    app._failed(plan, ValueError("a bug\nof ours"))
    assert await asyncio.wait_for(mesh.said.get(), 10) == StepFailed(5, StepId(7), "ValueError: a bug")
    mesh.config = resolve.resolve(flags.build({"model": str(smollm2), "device": "fake", "fake_lockstep": True}, None))
    app._failed(plan, ValueError("a bug\nof ours"))
    assert await asyncio.wait_for(mesh.said.get(), 10) == "a step of the group failed: ValueError: a bug"
    await app.stop()


async def test_a_group_that_is_aborted_and_not_made_anew(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody died, so no Reset comes: what failed was between the ranks, and the worker must not wait for ever."""
    app, mesh = await start(smollm2, monkeypatch, None)
    scheduler = Identity(Role.SCHEDULER, 0)
    monkeypatch.setattr(io, "ANEW_S", 0.2)
    app.on_message(scheduler, Reset(5))
    assert isinstance(await asyncio.wait_for(mesh.said.get(), 10), WorkerReady)
    app._on_aborted(4)  # of a session that is over
    app._on_aborted(5)
    said = await asyncio.wait_for(mesh.said.get(), 10)
    assert said == "the ranks that step together lost one another, and none of them is gone"
    assert mesh.said.empty()
    await app.stop()
