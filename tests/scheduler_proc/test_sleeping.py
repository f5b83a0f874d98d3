"""A scheduler that begins in a mesh that sleeps lets its workers sleep, though it never met the ones before."""

import pytest
from bench import COORDINATOR, LIFE, WORKER, limits

from meshlm.protocol.edges.admit import Load, Welcome
from meshlm.protocol.edges.step import Reset, WorkerAsleep
from meshlm.protocol.operations import Operation, OperationDone, OperationId, Sleep, WakeUp
from meshlm.protocol.sleeping import AWAKE, TAGS, WEIGHTS, Sleeping
from meshlm.runtime.process.events import PeerUp, Received, Send
from meshlm.scheduler_proc.core import Scheduler

ASLEEP = Sleeping(TAGS, 1)


def resets(sends: list[Send]) -> list[Sleeping | None]:
    return [send.message.sleeping for send in sends if isinstance(send.message, Reset)]


def asleep(core: Scheduler, state: Sleeping) -> list[Send]:
    return core.handle(Received(WORKER, LIFE, WorkerAsleep(core.session, state)), 3.0)


@pytest.mark.parametrize("state", [ASLEEP, Sleeping((WEIGHTS,), 2)])
def test_workers_wait_until_the_coordinator_has_said_how_they_were(state: Sleeping) -> None:
    core = Scheduler(limits(sleep_mode=True))
    assert resets(core.handle(PeerUp(WORKER, LIFE), 1.0)) == []
    assert resets(core.handle(Received(COORDINATOR, LIFE, Welcome(state)), 2.0)) == [state]
    assert [send.message.sleeping for send in core.report() if isinstance(send.message, Load)] == [state]
    assert core.handle(Received(COORDINATOR, LIFE, Welcome(AWAKE)), 2.5) == [], "the next coordinator's"
    asleep(core, state)
    assert core.workers.asleep


def test_workers_that_come_later_are_told_too() -> None:
    core = Scheduler(limits(sleep_mode=True))
    assert core.handle(Received(COORDINATOR, LIFE, Welcome(ASLEEP)), 1.0) == []
    assert resets(core.handle(PeerUp(WORKER, LIFE), 2.0)) == [ASLEEP]


def test_a_scheduler_that_hears_of_no_sleep_learns_it_from_its_workers() -> None:
    core = Scheduler(limits(sleep_mode=True))
    core.handle(PeerUp(WORKER, LIFE), 1.0)
    assert resets(core.handle(Received(COORDINATOR, LIFE, Welcome()), 2.0)) == [None]
    asleep(core, ASLEEP)
    assert core.workers.sleeping == ASLEEP


def test_where_none_sleeps_nobody_waits() -> None:
    assert resets(Scheduler(limits()).handle(PeerUp(WORKER, LIFE), 1.0)) == [None]


def test_what_is_asked_again_is_answered_once() -> None:
    """The coordinator lost sight of this process, not this process of its workers."""
    core = Scheduler(limits(sleep_mode=True))
    core.handle(Received(COORDINATOR, LIFE, Welcome(ASLEEP)), 1.0)
    core.handle(PeerUp(WORKER, LIFE), 2.0)
    asleep(core, ASLEEP)
    wake = Received(COORDINATOR, LIFE, Operation(OperationId("w"), WakeUp((WEIGHTS,))))
    left = Sleeping(("kv_cache",), 1)
    assert resets(core.handle(wake, 4.0)) == [left]
    assert core.handle(wake, 5.0) == []
    done = [send.message for send in asleep(core, left) if isinstance(send.message, OperationDone)]
    assert done == [OperationDone(OperationId("w"))]
    (again,) = core.handle(Received(COORDINATOR, LIFE, Operation(OperationId("s"), Sleep(1))), 6.0)[-1:]
    assert isinstance(again.message, Reset)
