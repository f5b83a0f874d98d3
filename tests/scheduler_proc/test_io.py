"""The scheduler's links and clock: what `meshlm status` is told that it does."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, limits
from msgspec import Struct

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import Reset, StepFailed, StepPlan, StepResult, WorkerReady
from meshlm.protocol.edges.token import Ended, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.errors import MessageTooLong
from meshlm.runtime.process.timeline import Timeline
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.io import SchedulerApp


class StubMesh:
    """Keeps what is sent and what is said of the phase."""

    def __init__(self, app: SchedulerApp) -> None:
        self.timeline = Timeline(Identity(Role.SCHEDULER, 0))
        self.app = app
        self.lines: list[dict[str, Any]] = []
        self.log = SimpleNamespace(
            debug=lambda *_, **__: None, warning=lambda event, **facts: self.lines.append({"event": event, **facts})
        )
        self.sent: list[Struct] = []
        self.beats: list[str] = []
        self.too_long: type[Struct] | None = None
        self.dropped: list[Identity] = []

    def drop(self, peer: Identity, reason: str) -> None:
        self.dropped.append(peer)

    def send(self, peer: Identity, message: Struct) -> None:
        if self.too_long is not None and isinstance(message, self.too_long):
            self.too_long = None
            raise MessageTooLong(peer, type(message).__name__, 101, 100)
        self.sent.append(message)

    def incarnation_of(self, peer: Identity) -> Incarnation:
        return LIFE

    def say_beat(self) -> None:
        self.beats.append(self.app.beat()[1])

    def last(self, kind: type[Struct]) -> Any:
        return next(message for message in reversed(self.sent) if isinstance(message, kind))


def hear(app: SchedulerApp, *said: tuple[Identity, Struct]) -> None:
    for peer, message in said:
        app.on_message(peer, message)
    app.flush()


def up(app: SchedulerApp, peers: Iterable[Identity]) -> None:
    for peer in peers:
        app.on_peer_up(peer, LIFE)
    app.flush()


def test_what_it_does_is_what_is_shown() -> None:
    app = SchedulerApp()
    assert app.beat() == (0, "starting")
    mesh: Any = StubMesh(app)
    app._mesh, app._core = mesh, Scheduler(limits())
    up(app, (DETOKENIZER, WORKER))
    assert app.beat() == (0, "waiting for its workers")
    assert mesh.beats == []
    hear(app, (WORKER, WorkerReady(mesh.last(Reset).session, 8, 4, 64, 64, 997)))
    assert mesh.beats == ["idle"], "said at once: the mesh may be ready now"
    work = EngineRequest(RequestId("r"), Handle(1), pack_i32([5]), SamplingParams(max_tokens=1), arrival_s=1.0)
    hear(app, (COORDINATOR, Assign(work, DETOKENIZER, LIFE)))
    assert app.beat() == (1, "1 requests"), "its step runs"
    plan: StepPlan = mesh.last(StepPlan)
    hear(app, (WORKER, StepResult(plan.session, plan.step, pack_i32([7]))))
    assert app.beat() == (1, "idle")
    assert mesh.beats == ["idle"]
    app.on_peer_down(WORKER, LIFE, "the process died")
    app.flush()
    assert mesh.beats == ["idle", "waiting for its workers"]


def test_what_no_frame_holds_ends_with_an_error() -> None:
    app = SchedulerApp()
    mesh: Any = StubMesh(app)
    app._mesh, app._core = mesh, Scheduler(limits())
    up(app, (DETOKENIZER, WORKER))
    hear(app, (WORKER, WorkerReady(mesh.last(Reset).session, 8, 4, 64, 64, 997)))
    work = EngineRequest(RequestId("r"), Handle(1), pack_i32([5]), SamplingParams(max_tokens=3), arrival_s=1.0)
    hear(app, (COORDINATOR, Assign(work, DETOKENIZER, LIFE)))
    plan = next(message for message in mesh.sent if isinstance(message, StepPlan))
    mesh.too_long = TokenDeltas
    hear(app, (WORKER, StepResult(plan.session, plan.step, pack_i32([7]))))
    told: TokenDeltas = mesh.last(TokenDeltas)
    text = "a message of 101 bytes is too long for the mesh (TokenDeltas to detokenizer/0; at most 100)"
    assert told.ended == [Ended(0, FinishReason.ERROR, message=text)]
    assert told.token_ids == b""
    assert not app._core.requests
    assert mesh.dropped == []


def test_a_plan_that_no_frame_holds_begins_anew_with_the_worker() -> None:
    app = SchedulerApp()
    mesh: Any = StubMesh(app)
    app._mesh, app._core = mesh, Scheduler(limits())
    up(app, (DETOKENIZER, WORKER))
    hear(app, (WORKER, WorkerReady(mesh.last(Reset).session, 8, 4, 64, 64, 997)))
    work = EngineRequest(RequestId("r"), Handle(1), pack_i32([5]), SamplingParams(max_tokens=3), arrival_s=1.0)
    mesh.too_long = StepPlan
    hear(app, (COORDINATOR, Assign(work, DETOKENIZER, LIFE)))
    assert mesh.dropped == [WORKER]


def test_the_log_names_the_requests_of_a_step_that_is_lost() -> None:
    app = SchedulerApp()
    mesh: Any = StubMesh(app)
    app._mesh, app._core = mesh, Scheduler(limits())
    up(app, (DETOKENIZER, WORKER))
    hear(app, (WORKER, WorkerReady(mesh.last(Reset).session, 8, 4, 64, 64, 997)))
    for number in (1, 2):
        work = EngineRequest(
            RequestId(f"r{number}"), Handle(number), pack_i32([5]), SamplingParams(max_tokens=9), arrival_s=1.0
        )
        hear(app, (COORDINATOR, Assign(work, DETOKENIZER, LIFE)))
    first = next(message for message in mesh.sent if isinstance(message, StepPlan))
    hear(app, (WORKER, StepFailed(first.session + 7, first.step, "of another session")))
    assert mesh.lines == []
    hear(app, (WORKER, StepFailed(first.session, first.step, "a kernel failed")))
    assert mesh.lines == [
        {"event": "steps are lost", "steps": [first.step], "reason": "a kernel failed", "requests": "r1"}
    ]
    hear(app, (WORKER, WorkerReady(mesh.last(Reset).session, 8, 4, 64, 64, 997)))  # what was behind it is planned anew
    app.on_peer_down(WORKER, LIFE, "the process died")
    assert mesh.lines[1]["reason"] == "worker/0: the process died"
    assert mesh.lines[1]["requests"] == "r2"
    app.on_peer_down(WORKER, LIFE, "the process died")
    assert len(mesh.lines) == 2, "nothing is in flight any more"
