"""The asker of an operation gets one answer, and never waits in vain."""

import asyncio

from msgspec import Struct

from meshlm.protocol.ids import COORDINATOR, Identity
from meshlm.protocol.operations import Operation, OperationDone, OperationId, Profile, combine
from meshlm.runtime.errors import LinkDown
from meshlm.runtime.operations import AskedOperations


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


async def test_a_coordinator_that_is_away_or_dies_is_not_waited_for() -> None:
    assert (
        await AskedOperations(Coordinator(here=False).send).ask(Profile(True))
    ).error == "the coordinator is not there"
    asked = AskedOperations(Coordinator().send)
    asking = asyncio.ensure_future(asked.ask(Profile(True)))
    await asyncio.sleep(0)
    asked.coordinator_lost()
    assert "the coordinator died" in (await asking).error


def test_one_error_is_the_answer() -> None:
    name = OperationId("x")
    assert combine(name, [OperationDone(name, paths=("a",)), OperationDone(name, paths=("b",))]).paths == ("a", "b")
    both = [OperationDone(name, paths=("a",)), OperationDone(name, "is running already")]
    assert combine(name, both) == OperationDone(name, "is running already")
