"""The asker of an operation gets one answer, and never waits in vain."""

import asyncio

import pytest
from msgspec import Struct

from meshlm.protocol.operations import Operation, OperationDone, OperationId, Profile, Stop, combine
from meshlm.protocol.wire.ids import COORDINATOR, Identity
from meshlm.runtime.errors import LinkDown
from meshlm.runtime.mesh import operations
from meshlm.runtime.mesh.operations import AskedOperations


class Coordinator:
    """Keeps what it is asked; `here`: it can be reached."""

    def __init__(self, here: bool = True) -> None:
        self.here = here
        self.heard: list[Operation] = []

    def send(self, to: Identity, message: Struct) -> None:
        assert to == COORDINATOR
        assert isinstance(message, Operation)
        if not self.here:
            raise LinkDown(to)
        self.heard.append(message)


async def test_each_answer_finds_its_question() -> None:
    coordinator = Coordinator()
    asked = AskedOperations(coordinator.send)
    asking = [asyncio.ensure_future(asked.ask(Profile(start))) for start in (True, False)]
    await asyncio.sleep(0)
    first, second = (operation.id for operation in coordinator.heard)
    asked.answered(OperationDone(OperationId("of nobody")))
    asked.answered(OperationDone(second, paths=("b",)))
    asked.answered(OperationDone(first))
    assert [await one for one in asking] == [OperationDone(first), OperationDone(second, paths=("b",))]
    asked.answered(OperationDone(first))


async def test_a_coordinator_that_is_away_is_waited_for() -> None:
    coordinator = Coordinator(here=False)
    asked = AskedOperations(coordinator.send)
    asking = asyncio.ensure_future(asked.ask(Profile(True)))
    await asyncio.sleep(0)
    asked.coordinator_up()  # it goes again at once
    coordinator.here = True
    asked.coordinator_up()
    (operation,) = coordinator.heard
    asked.answered(OperationDone(operation.id, paths=("a",)))
    assert await asking == OperationDone(operation.id, paths=("a",))
    asked.coordinator_up()
    assert len(coordinator.heard) == 1


async def test_what_a_coordinator_did_not_answer_is_asked_of_the_next_under_the_same_id() -> None:
    coordinator = Coordinator()
    asked = AskedOperations(coordinator.send)
    asking = asyncio.ensure_future(asked.ask(Profile(True)))
    await asyncio.sleep(0)
    asked.coordinator_lost()
    asked.coordinator_up()
    first, second = coordinator.heard
    assert first == second
    asked.answered(OperationDone(first.id))
    assert await asking == OperationDone(first.id)


@pytest.mark.parametrize("here", [True, False])
async def test_one_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    monkeypatch.setattr(operations, "HOLD_S", 0.01)
    asked = AskedOperations(Coordinator(here).send)
    asking = asyncio.ensure_future(asked.ask(Profile(True)))
    await asyncio.sleep(0)
    asked.coordinator_lost()
    assert (await asking).error == (
        "the coordinator died before it answered" if here else "the coordinator is not there"
    )


async def test_the_end_of_the_mesh_waits_for_no_coordinator() -> None:
    assert (await AskedOperations(Coordinator(here=False).send).ask(Stop())).error == "the coordinator is not there"
    asked = AskedOperations(Coordinator().send)
    asking = asyncio.ensure_future(asked.ask(Stop()))
    await asyncio.sleep(0)
    asked.coordinator_lost()
    assert "the coordinator died" in (await asking).error


def test_one_error_is_the_answer() -> None:
    name = OperationId("x")
    assert combine(name, [OperationDone(name, paths=("a",)), OperationDone(name, paths=("b",))]).paths == ("a", "b")
    both = [OperationDone(name, paths=("a",)), OperationDone(name, "is running already")]
    assert combine(name, both) == OperationDone(name, "is running already")
