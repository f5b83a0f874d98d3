"""Rolling restarts: one process after the other, a frontend always serves, and deaths in between change nothing of that."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.group.core import Group, State
from meshlm.supervisor.group.events import (
    Add,
    AskToStop,
    BecameReady,
    Changed,
    Drained,
    Exited,
    Replace,
    Retire,
    SaidFailed,
    Spawn,
    Start,
    Stop,
    TellDied,
    Tick,
)
from meshlm.supervisor.group.operations import Operations
from meshlm.supervisor.group.rolling import (
    ORDER,
    SETTLE_S,
    SPARE_INDEX,
    AskToLeave,
    Effect,
    Event,
    Outcome,
    Prepare,
    Prepared,
    Restart,
    Rolling,
    Say,
    chosen,
)

FRONTEND, OTHER = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1)
WORKER, COORDINATOR = Identity(Role.WORKER), Identity(Role.COORDINATOR)
SPARE = Identity(Role.FRONTEND, SPARE_INDEX)


class Bench:
    """A group that is ready, and a clock."""

    def __init__(self, *identities: Identity, workers_per_rank: int = 1) -> None:
        self.rolling = Rolling(Group(identities, 100, 60.0), workers_per_rank)
        self.group = self.rolling.group
        self.now = 1000.0
        self.rolling.roll(Start(), self.now)
        for identity in identities:
            self.ready(identity)

    def tell(self, event: Event, seconds: float = 0.0) -> list[Effect]:
        """The effects, less what is said."""
        self.now += seconds
        effects = self.rolling.roll(event, self.now)
        self.rolling.check()
        return [effect for effect in effects if not isinstance(effect, Say)]

    def ready(self, identity: Identity) -> list[Effect]:
        return self.tell(BecameReady(identity, self.group.processes[identity].incarnation))

    def exit(self, identity: Identity, code: int = 0) -> list[Effect]:
        return self.tell(Exited(identity, self.group.processes[identity].incarnation, code))

    def wait(self) -> list[Effect]:
        return self.tell(Tick(), SETTLE_S)


def test_a_standby_takes_the_place_of_the_old_one() -> None:
    bench = Bench(WORKER, FRONTEND)
    old = bench.group.processes[WORKER].incarnation
    assert bench.tell(Restart((WORKER,))) == [Prepare(WORKER)]
    assert bench.group.processes[WORKER].state is State.READY
    assert bench.tell(Prepared(WORKER)) == [AskToLeave(WORKER)]
    died, spawn = bench.exit(WORKER)
    assert died == TellDied(WORKER, old)
    assert isinstance(spawn, Spawn)
    assert spawn.incarnation > old
    assert bench.ready(WORKER) == []
    assert bench.wait() == [Outcome()]
    assert not bench.rolling.restarting
    assert not bench.group.processes[WORKER].deaths
    assert bench.group.processes[WORKER].restarts == 1


W1, W2, W3 = (Identity(Role.WORKER, index) for index in (1, 2, 3))


def test_the_workers_of_one_rank_are_replaced_as_one() -> None:
    bench = Bench(WORKER, W1, W2, W3, workers_per_rank=2)
    assert bench.tell(Restart(chosen("worker", bench.group.processes))) == [Prepare(WORKER), Prepare(W1)]
    assert bench.tell(Prepared(W1)) == []
    assert bench.tell(Prepared(WORKER)) == [AskToLeave(WORKER), AskToLeave(W1)]
    assert isinstance(bench.exit(W1)[1], Spawn)
    assert isinstance(bench.exit(WORKER, 1)[1], Spawn), "the group was given up when the other left: no death"
    bench.ready(WORKER)
    assert bench.wait() == []
    bench.ready(W1)
    assert bench.wait() == [Prepare(W2), Prepare(W3)]
    for worker in (W2, W3):
        bench.tell(Prepared(worker))
    for worker in (W2, W3):
        bench.exit(worker)
    for worker in (W2, W3):
        bench.ready(worker)
    assert bench.wait() == [Outcome()]
    assert not any(process.deaths for process in bench.group.processes.values())
    assert [process.restarts for process in bench.group.processes.values()] == [1, 1, 1, 1]


def test_one_worker_of_a_rank_brings_the_others_with_it() -> None:
    bench = Bench(WORKER, W1, W2, W3, workers_per_rank=2)
    assert bench.tell(Restart((W3,))) == [Prepare(W2), Prepare(W3)]
    bench.exit(W2, -9)
    assert bench.group.processes[W2].state is State.STARTING, "it died meanwhile"
    bench.exit(W3)
    bench.ready(W3)
    bench.ready(W2)
    assert bench.wait() == [Outcome()]


def test_frontends_take_turns() -> None:
    bench = Bench(FRONTEND, OTHER)
    assert bench.tell(Restart((FRONTEND, OTHER))) == [AskToLeave(FRONTEND)]
    bench.exit(FRONTEND)
    bench.ready(FRONTEND)
    assert bench.wait() == [AskToLeave(OTHER)]
    bench.exit(OTHER)
    bench.ready(OTHER)
    assert bench.wait() == [Outcome()]


def test_the_only_frontend_gets_a_spare_beside_it() -> None:
    bench = Bench(FRONTEND, WORKER)
    (spawn,) = bench.tell(Restart((FRONTEND,)))
    assert isinstance(spawn, Spawn)
    assert spawn.identity == SPARE
    assert bench.ready(SPARE) == [AskToLeave(FRONTEND)]
    bench.exit(FRONTEND)
    assert bench.ready(FRONTEND) == [AskToLeave(SPARE)]
    assert [type(effect) for effect in bench.exit(SPARE)] == [TellDied]
    assert SPARE not in bench.group.processes
    assert bench.wait() == [Outcome()]


def test_a_standby_that_does_not_load_leaves_the_old_one_alone() -> None:
    bench = Bench(WORKER)
    bench.tell(Restart((WORKER,)))
    (outcome,) = bench.tell(Prepared(WORKER, "exit code 1"))
    assert isinstance(outcome, Outcome)
    assert "worker/0" in outcome.failure
    assert "exit code 1" in outcome.failure
    assert bench.group.processes[WORKER].state is State.READY
    assert not bench.rolling.restarting


def test_a_spare_that_does_not_start_leaves_the_frontend_alone() -> None:
    bench = Bench(FRONTEND)
    bench.tell(Restart((FRONTEND,)))
    bench.tell(SaidFailed(SPARE, bench.group.processes[SPARE].incarnation, "no port"))
    effects = bench.exit(SPARE, 1)
    assert any(isinstance(effect, Outcome) and "no port" in effect.failure for effect in effects)
    assert bench.group.processes[FRONTEND].state is State.READY


def test_one_that_dies_meanwhile_is_started_as_ever() -> None:
    bench = Bench(WORKER)
    bench.tell(Restart((WORKER,)))
    assert [type(effect) for effect in bench.exit(WORKER, -9)] == [TellDied, Spawn]
    bench.ready(WORKER)
    bench.tell(Tick())
    assert bench.wait() == [Outcome()]


def test_too_slow_a_start_ends_the_restart_with_a_word() -> None:
    bench = Bench(WORKER, COORDINATOR)
    bench.tell(Restart((WORKER, COORDINATOR)))
    bench.tell(Prepared(WORKER))
    bench.exit(WORKER)
    (outcome,) = [effect for effect in bench.tell(Tick(), 61.0) if not isinstance(effect, Replace)]
    assert isinstance(outcome, Outcome)
    assert "worker/0" in outcome.failure
    assert bench.group.processes[COORDINATOR].restarts == 0


def test_ranks_come_and_go_between_restarts() -> None:
    """A Rolling scales as its group does; neither is begun while the other is under way."""
    bench = Bench(WORKER, COORDINATOR)
    operations = Operations(
        bench.rolling, lambda event: None, lambda on: None, lambda: None, dict, lambda peer, message: True
    )
    added = Identity(Role.WORKER, 1)
    bench.tell(Add((added,)))
    assert operations.answer({"command": "restart", "what": "worker"}) == {"error": "the mesh is being scaled"}
    assert bench.ready(added) == [Changed()]
    bench.tell(Retire((added,), bench.now + 60.0))
    assert bench.tell(Drained((added,))) == [AskToStop(added)]
    assert bench.exit(added)[1:] == [Changed()]
    assert operations.answer({"command": "restart", "what": "worker"}) == {"processes": [str(WORKER)]}


def test_what_can_be_chosen() -> None:
    group = Group([FRONTEND, OTHER, WORKER, COORDINATOR], 3, 60.0)
    assert chosen("all", group.processes) == (COORDINATOR, WORKER, FRONTEND, OTHER)
    assert chosen("frontend", group.processes) == (FRONTEND, OTHER)
    assert chosen("frontend/1", group.processes) == (OTHER,)
    for wrong in ("frontend/7", "supervisor", "scheduler", "cat"):
        with pytest.raises(ValueError, match=r"there is|no process name"):
            chosen(wrong, group.processes)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_dies_a_restart_comes_to_its_end(data: st.DataObject) -> None:
    """One process at most is away on purpose, the last frontend never; when all is quiet all are ready."""
    everyone = [COORDINATOR, WORKER, FRONTEND, *([OTHER] if data.draw(st.booleans()) else [])]
    everyone += [W1] if (in_group := data.draw(st.booleans())) else []
    bench = Bench(*everyone, workers_per_rank=2 if in_group else 1)
    wanted = chosen(data.draw(st.sampled_from(["all", "frontend", "worker"])), bench.group.processes)
    todo = bench.tell(Restart(wanted))
    outcomes: list[Outcome] = []
    killed = 0
    prepare: list[Identity] = []
    for _ in range(400):
        outcomes += [effect for effect in todo if isinstance(effect, Outcome)]
        processes = bench.group.processes
        leaving = [p.identity for p in processes.values() if p.state is State.STOPPING]
        assert len(leaving) <= 1 or {identity.role for identity in leaving} == {Role.WORKER}
        if leaving and leaving[0].role is Role.FRONTEND and not killed:
            assert any(p.state is State.READY for p in processes.values() if p.identity.role is Role.FRONTEND)
        starting = [p.identity for p in processes.values() if p.state is State.STARTING]
        prepare += [effect.identity for effect in todo if isinstance(effect, Prepare)]
        if killed < 3 and data.draw(st.integers(0, 9)) == 0:
            killed += 1
            alive = [p.identity for p in processes.values() if p.state in (State.READY, State.STARTING)]
            todo = bench.exit(data.draw(st.sampled_from(alive)), -9)
        elif prepare:
            todo = bench.tell(Prepared(prepare.pop()))
        elif leaving:
            todo = bench.exit(leaving[0])
        elif starting:
            todo = bench.ready(data.draw(st.sampled_from(starting)))
        elif not bench.rolling.restarting and all(p.state is State.READY for p in processes.values()):
            break
        else:
            todo = bench.wait()
    assert not bench.rolling.restarting
    assert len(outcomes) == 1
    assert set(bench.group.processes) == set(everyone)
    assert all(process.state is State.READY for process in bench.group.processes.values())
    if not killed:
        assert outcomes == [Outcome()]
        assert all(bench.group.processes[identity].restarts == 1 for identity in wanted)


def test_stop_ends_a_restart() -> None:
    bench = Bench(FRONTEND, WORKER)
    bench.tell(Restart((FRONTEND,)))
    bench.ready(SPARE)
    bench.tell(Stop())
    assert not bench.rolling.restarting
    for identity in (FRONTEND, SPARE, WORKER):
        bench.exit(identity)
    assert all(process.state is State.STOPPED for process in bench.group.processes.values())


def test_processes_of_every_role_can_be_replaced() -> None:
    assert set(ORDER) == set(Role) - {Role.SUPERVISOR}
    assert chosen("store", [Identity(Role.WORKER), Identity(Role.STORE)]) == (Identity(Role.STORE),)
