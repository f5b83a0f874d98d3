"""The scheduler's links and clock: what `meshlm status` is told that it does."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, limits
from msgspec import Struct

from meshlm.protocol.admit_edge import Assign, Work
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import Handle, Identity, Incarnation, RequestId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import Reset, StepPlan, StepResult, WorkerReady
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.io import SchedulerApp


class StubMesh:
    """Keeps what is sent and what is said of the phase."""

    def __init__(self, app: SchedulerApp) -> None:
        self.app = app
        self.log = SimpleNamespace(debug=lambda *_, **__: None)
        self.sent: list[Struct] = []
        self.beats: list[str] = []

    def send(self, peer: Identity, message: Struct) -> None:
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
    work = Work(RequestId("r"), Handle(1), pack_i32([5]), SamplingParams(max_tokens=1), arrival_s=1.0)
    hear(app, (COORDINATOR, Assign(work, DETOKENIZER, LIFE)))
    assert app.beat() == (1, "1 requests"), "its step runs"
    plan: StepPlan = mesh.last(StepPlan)
    hear(app, (WORKER, StepResult(plan.session, plan.step, pack_i32([7]))))
    assert app.beat() == (1, "idle")
    assert mesh.beats == ["idle"]
    app.on_peer_down(WORKER, LIFE, "the process died")
    app.flush()
    assert mesh.beats == ["idle", "waiting for its workers"]
