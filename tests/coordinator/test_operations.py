"""An operation goes to every rank and is answered once, whatever dies."""

from meshlm.coordinator.operations import LIMIT_S, Operations
from meshlm.protocol.ids import Identity, Role
from meshlm.protocol.operations import Operation, OperationDone, OperationId, Profile
from meshlm.runtime.events import Send

ASKER, RANKS = Identity(Role.FRONTEND), [Identity(Role.SCHEDULER, number) for number in range(2)]
NAME = OperationId("n")
OPERATION = Operation(NAME, Profile(False))


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
    told = OperationDone(NAME, "scheduler/1 is not there")
    assert Operations().ask(ASKER, OPERATION, RANKS[:1], 2, 0.0) == [Send(ASKER, told)]


def test_a_rank_that_dies_or_is_silent_is_an_error() -> None:
    operations = asked()
    assert operations.answered(RANKS[0], OperationDone(NAME)) == []
    told = OperationDone(NAME, "scheduler/1 died before it answered")
    assert operations.lost(RANKS[1]) == [Send(ASKER, told)]
    operations = asked()
    assert operations.expire(LIMIT_S - 1) == []
    told = OperationDone(NAME, f"scheduler/0 did not answer in {LIMIT_S:.0f} s")
    assert operations.expire(LIMIT_S) == [Send(ASKER, told)]
    assert operations.expire(LIMIT_S) == []


def test_an_asker_that_dies_is_forgotten() -> None:
    operations = asked()
    assert operations.lost(ASKER) == []
    assert operations.answered(RANKS[0], OperationDone(NAME)) == []
    assert operations.answered(RANKS[1], OperationDone(NAME)) == []
