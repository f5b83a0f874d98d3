"""An operation goes to every rank and is answered once, whatever dies."""

import msgspec
import pytest
from coordinator_bench import LIFE, load, member

from meshlm.coordinator.core import Coordinator
from meshlm.coordinator.joint import JointGroup
from meshlm.coordinator.operations import HOLD_S, Operations
from meshlm.protocol.edges import control
from meshlm.protocol.lockstep import JointOrder, JointRank
from meshlm.protocol.operations import (
    Action,
    Operation,
    OperationDone,
    OperationId,
    Pause,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    Stop,
    WakeUp,
    limit_s,
)
from meshlm.protocol.wire.ids import HEAD, Identity, Role
from meshlm.runtime.process.events import Received, Send

ASKER, RANKS = Identity(Role.FRONTEND), [Identity(Role.SCHEDULER, number) for number in range(2)]
NAME = OperationId("n")
OPERATION = Operation(NAME, Profile(False))
LIMIT_S = limit_s(OPERATION.action)


def asked() -> Operations:
    operations = Operations()
    assert operations.ask(ASKER, OPERATION, RANKS, 2, 0.0) == [Send(rank, OPERATION) for rank in RANKS]
    return operations


def test_all_ranks_answer() -> None:
    operations = asked()
    assert operations.ask(ASKER, OPERATION, RANKS, 2, 1.0) == [], "it is under way"
    assert operations.answered(RANKS[1], OperationDone(NAME, paths=("b",))) == []
    assert operations.answered(RANKS[1], OperationDone(NAME, paths=("again",))) == []
    assert operations.answered(Identity(Role.SCHEDULER, 7), OperationDone(NAME)) == []
    told = OperationDone(NAME, paths=("a", "b"))
    assert operations.answered(RANKS[0], OperationDone(NAME, paths=("a",))) == [Send(ASKER, told)]
    assert operations.answered(RANKS[0], OperationDone(NAME)) == [], "told once"


def test_none_is_asked_while_one_is_not_there() -> None:
    operations = Operations()
    assert operations.ask(ASKER, OPERATION, RANKS[:1], 2, 0.0) == []
    assert operations.ask(ASKER, OPERATION, RANKS[:1], 2, 0.0) == [], "it waits already"
    assert operations.joined(RANKS[0], RANKS[:1], 2, 1.0) == []
    assert operations.joined(RANKS[1], RANKS, 2, 2.0) == [Send(rank, OPERATION) for rank in RANKS]
    assert operations.joined(RANKS[1], RANKS, 2, 3.0) == []
    assert operations.expire(RANKS, 2, HOLD_S + 1) == []


def test_an_operation_waits_for_a_rank_for_a_while() -> None:
    operations = Operations()
    assert operations.ask(ASKER, OPERATION, RANKS[:1], 2, 0.0) == []
    assert operations.expire(RANKS[:1], 2, HOLD_S - 1) == []
    told = OperationDone(NAME, "scheduler/1 is not there")
    assert operations.expire(RANKS[:1], 2, HOLD_S) == [Send(ASKER, told)]
    assert operations.joined(RANKS[1], RANKS, 2, HOLD_S) == []
    assert operations.ask(ASKER, OPERATION, RANKS[:1], 2, 0.0) == []
    assert operations.joined(RANKS[0], RANKS[:1], 1, 1.0) == [Send(RANKS[0], OPERATION)], "one is enough now"
    stop = Operation(OperationId("s"), Stop())
    told = OperationDone(stop.id, "scheduler/1 is not there")
    assert operations.ask(ASKER, stop, RANKS[:1], 2, 0.0) == [Send(ASKER, told)], "the mesh does not wait with its end"


@pytest.mark.parametrize("action", [Pause(abort=True), Resume(), ResetPrefixCache(), Sleep(2), WakeUp()])
def test_what_may_be_done_twice_is_asked_of_the_next_incarnation(action: Action) -> None:
    operations, operation = Operations(), Operation(NAME, action)
    assert operations.ask(ASKER, operation, RANKS, 2, 0.0) == [Send(rank, operation) for rank in RANKS]
    assert operations.answered(RANKS[0], OperationDone(NAME)) == []
    assert operations.lost(RANKS[1], 1.0) == []
    assert operations.lost(RANKS[0], 1.0) == [], "it has answered"
    assert operations.joined(RANKS[0], RANKS[:1], 2, 2.0) == []
    assert operations.joined(RANKS[1], RANKS, 2, 2.0) == [Send(RANKS[1], operation)]
    assert operations.lost(RANKS[1], 3.0) == []
    assert operations.expire(RANKS, 2, 2.0 + HOLD_S) == []
    told = OperationDone(NAME, "scheduler/1 died before it answered")
    assert operations.expire(RANKS, 2, 3.0 + HOLD_S) == [Send(ASKER, told)]


def test_a_rank_that_dies_or_is_silent_is_an_error() -> None:
    operations = asked()
    assert operations.answered(RANKS[0], OperationDone(NAME)) == []
    told = OperationDone(NAME, "scheduler/1 died before it answered")
    assert operations.lost(RANKS[1], 0.0) == [Send(ASKER, told)]
    operations = asked()
    assert operations.expire(RANKS, 2, LIMIT_S - 1) == []
    told = OperationDone(NAME, f"scheduler/0 did not answer in {LIMIT_S:.0f} s")
    assert operations.expire(RANKS, 2, LIMIT_S) == [Send(ASKER, told)]
    assert operations.expire(RANKS, 2, LIMIT_S) == []


def test_an_asker_that_dies_is_forgotten() -> None:
    operations = Operations()
    assert operations.ask(ASKER, OPERATION, RANKS[:1], 2, 0.0) == []
    assert operations.lost(ASKER, 0.0) == []
    assert operations.joined(RANKS[1], RANKS, 2, 1.0) == []
    operations = asked()
    assert operations.lost(ASKER, 0.0) == []
    assert operations.answered(RANKS[0], OperationDone(NAME)) == []
    assert operations.answered(RANKS[1], OperationDone(NAME)) == []


def test_ranks_that_step_together_rest_before_they_stop() -> None:
    """All after the same step: one that stopped alone would leave the others waiting for it in a collective."""
    core = Coordinator(100, 2, lockstep=JointGroup(2, 1))
    ranks = {identity: JointRank(depth=2) for identity in RANKS}
    stop = Operation(NAME, Stop())
    asked: list[Identity] = []

    def take(sends: list[Send]) -> None:
        for send in sends:
            match send.message:
                case JointOrder() as order:
                    ranks[send.to].follow(order)
                    report(send.to)
                case Operation():
                    assert send.message == stop
                    asked.append(send.to)

    def report(rank: Identity) -> None:
        told = msgspec.structs.replace(ranks[rank].report(), incarnation=LIFE)
        take(core.handle(Received(rank, LIFE, told), 0.0))

    def step(rank: Identity) -> None:
        if ranks[rank].may_begin():
            ranks[rank].begin()
            ranks[rank].finish(ranks[rank].epoch)
            report(rank)

    for rank in RANKS:
        take(core.handle(Received(rank, LIFE, control.Join(member(rank))), 0.0))
        take(core.handle(Received(rank, LIFE, load()), 0.0))
    for rank in RANKS:
        ranks[rank].has_work = True
        report(rank)
    for _ in range(3):
        step(RANKS[0])
    assert ranks[RANKS[0]].step == 3
    take(core.handle(Received(HEAD, LIFE, stop), 0.0))
    assert asked == [], "the other rank is behind"
    for _ in range(3):
        assert asked == []
        step(RANKS[1])
    assert asked == RANKS
    assert {rank.step for rank in ranks.values()} == {rank.finished for rank in ranks.values()} == {3}
    take(core.handle(Received(RANKS[0], LIFE, OperationDone(NAME)), 0.0))
    (told,) = core.handle(Received(RANKS[1], LIFE, OperationDone(NAME)), 0.0)
    assert told == Send(HEAD, OperationDone(NAME))
