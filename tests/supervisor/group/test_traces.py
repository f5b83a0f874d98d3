"""Traces of all workers: gathered, and never waited for in vain."""

import asyncio

from msgspec import Struct

from meshlm.protocol.control_edge import Profile, Profiled
from meshlm.protocol.ids import Identity, Role
from meshlm.supervisor.group.traces import Traces

ONE, TWO = Identity(Role.WORKER, 0), Identity(Role.WORKER, 1)


class Workers:
    """Those in `there` can be reached."""

    def __init__(self, *there: Identity) -> None:
        self.there = there
        self.asked: list[tuple[Identity, Profile]] = []

    def send(self, to: Identity, message: Struct) -> bool:
        assert isinstance(message, Profile)
        self.asked.append((to, message))
        return to in self.there


async def test_paths_of_all_workers_in_their_order() -> None:
    workers = Workers(ONE, TWO)
    traces = Traces(workers.send)
    asking = asyncio.ensure_future(traces.ask([ONE, TWO], start=False))
    await asyncio.sleep(0)
    handle = workers.asked[0][1].handle
    assert workers.asked == [(ONE, Profile(handle, False)), (TWO, Profile(handle, False))]
    traces.answered(TWO, Profiled(handle, ("b",)))
    traces.answered(TWO, Profiled(handle + 1, ("of nobody",)))
    traces.answered(ONE, Profiled(handle, ("a",)))
    assert await asking == Profiled(handle, ("a", "b"))
    traces.answered(ONE, Profiled(handle, ("late",)))


async def test_one_error_is_the_answer() -> None:
    workers = Workers(ONE, TWO)
    traces = Traces(workers.send)
    asking = asyncio.ensure_future(traces.ask([ONE, TWO], start=True))
    await asyncio.sleep(0)
    traces.answered(ONE, Profiled(1))
    traces.answered(TWO, Profiled(1, error="is running already"))
    assert await asking == Profiled(1, (), "is running already")


async def test_a_worker_that_is_away_or_dies_is_not_waited_for() -> None:
    workers = Workers(ONE)
    traces = Traces(workers.send)
    asking = asyncio.ensure_future(traces.ask([ONE, TWO], start=True))
    await asyncio.sleep(0)
    traces.lost(ONE)
    assert (await asking).error == "worker/0 is not there"
    assert (await traces.ask([], start=True)).error == "no worker is there"
