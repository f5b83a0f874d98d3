"""A dashboard shows the requests of all frontends: each tells the others, by way of the supervisor."""

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from meshlm.frontend.dashboard import feed as feeds
from meshlm.frontend.dashboard import requests as others
from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.dashboard.requests import MAX_ENDED, MAX_RUNNING, Noted, OtherFrontends
from meshlm.frontend.dashboard.snapshot import Facts
from meshlm.protocol.dashboard import History, RequestView, Snapshot
from meshlm.protocol.edges.control import AskProcesses, AskRequests, FrontendRequests, MeshProcesses, ProcessReport
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.process.figures import Figures
from meshlm.supervisor.requests_of_frontends import pass_on

ASKER = Identity(Role.FRONTEND, 0)


def view(name: str, at_s: float, seconds: float = 1.0) -> RequestView:
    return RequestView(name, "/v1/completions", at_s, seconds, {})


class Frontends:
    """Some frontends and their supervisor. Those in `stuck` say nothing."""

    def __init__(self, count: int) -> None:
        self.names = [Identity(Role.FRONTEND, index) for index in range(count)]
        self.stuck: set[Identity] = set()
        self.feeds = {name: Feed(Member(self, name), Facts(str(name), "1", "m"), 3) for name in self.names}
        self.num_passed_on = 0

    def to_supervisor(self, sender: Identity, message: Struct) -> None:
        if isinstance(message, AskProcesses):
            known = (ProcessReport(name, Incarnation(1), 1, "ready", 0.0, 0, "") for name in self.names)
            self.feeds[sender].told(MeshProcesses(tuple(known)))
        else:
            assert pass_on(sender, message, self.names, self.send)

    def send(self, peer: Identity, message: Any) -> bool:
        self.num_passed_on += 1
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AskRequests | FrontendRequests)
        if peer not in self.stuck:
            asyncio.get_running_loop().call_soon(self.feeds[peer].told, message)
        return True

    def end(self, index: int, name: str, wall_s: float) -> None:
        """A request of this frontend has its answer."""
        noted = (name, "/v1/completions", 200, "", 1, 5, 11.0, wall_s, 10.0, 0.0, 0.0, 0.0, 0.0, None, None, "0", 3, 0)
        self.feeds[self.names[index]]._ended.add(Noted(*noted))


class Member:
    """One frontend's place in it."""

    num_open = 0

    def __init__(self, mesh: Frontends, name: Identity) -> None:
        self._mesh, self._name, self.figures = mesh, name, Figures()

    def tell_supervisor(self, message: Struct) -> None:
        self._mesh.to_supervisor(self._name, message)

    def open_choices(self) -> list[Any]:
        return []


async def history(feed: Feed) -> list[tuple[str, str]]:
    found = msgspec.json.decode(await feed.history(), type=History)
    assert found.num_ended >= len(found.requests)
    return [(one.id, one.frontend) for one in found.requests]


async def test_history_has_the_requests_of_all_by_their_end() -> None:
    mesh = Frontends(3)
    for index, name, at in ((0, "a", 100.0), (1, "b", 101.0), (2, "c", 99.0), (1, "d", 103.0)):
        mesh.end(index, name, at)
    expected = [("c", "frontend/2"), ("a", ""), ("b", "frontend/1"), ("d", "frontend/1")]
    assert await history(mesh.feeds[ASKER]) == expected
    assert await history(mesh.feeds[ASKER]) == expected, "each once"
    mesh.end(2, "e", 104.0)
    assert (await history(mesh.feeds[ASKER]))[-1] == ("e", "frontend/2")
    assert [frontend for _, frontend in await history(mesh.feeds[mesh.names[1]])] == [
        "frontend/2",
        "frontend/0",
        "",
        "",
        "frontend/2",
    ]


async def test_a_stuck_frontend_costs_a_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "ANSWER_S", 0.05)
    mesh = Frontends(3)
    mesh.stuck = {mesh.names[2]}
    mesh.end(1, "b", 101.0)
    mesh.end(2, "c", 99.0)
    assert await history(mesh.feeds[ASKER]) == [("b", "frontend/1")]


async def test_events_have_what_ends_at_others_and_nobody_is_asked_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "STEADY_S", 0.002)
    monkeypatch.setattr(feeds, "OTHERS_EVERY_S", 0.002)
    mesh = Frontends(2)
    mesh.end(1, "early", 50.0)
    await asyncio.sleep(0)
    assert mesh.num_passed_on == 0
    feed = mesh.feeds[ASKER]
    watcher, seen = feed.join(), list[RequestView]()
    async with asyncio.timeout(10):
        while len(seen) < 3:
            event = await watcher.next()
            assert event is not None
            found = msgspec.json.decode(event.removeprefix(b"data: ").strip(), type=Snapshot)
            seen += found.ended
            if len(seen) == 1:
                mesh.end(0, "own", 51.0)
                mesh.end(1, "late", 52.0)
    assert sorted((one.id, one.frontend) for one in seen) == [
        ("early", "frontend/1"),
        ("late", "frontend/1"),
        ("own", ""),
    ]
    assert found.num_ended == 3
    feed.close()


def told(since_s: float, until_s: float, ended: list[RequestView], running: list[RequestView]) -> FrontendRequests:
    return FrontendRequests("frontend/1", ASKER, since_s, until_s, len(ended), tuple(ended), tuple(running))


def test_the_oldest_of_all_run_until_their_frontend_is_silent() -> None:
    known = OtherFrontends()
    known.take(told(0.0, 0.0, [], [view(f"theirs-{at}", at) for at in range(0, 100, 2)]), 10.0)
    own = [view(f"own-{at}", at) for at in range(1, 100, 2)]
    shown = known.with_running(own, 10.5)
    assert len(shown) == MAX_RUNNING
    assert [one.at_s for one in shown] == list(range(50))
    assert {one.frontend for one in shown} == {"", "frontend/1"}
    assert known.with_running(own, 10.0 + others.SILENT_S) == tuple(own)


def test_an_answer_that_was_asked_for_twice_counts_once_and_few_are_kept() -> None:
    known = OtherFrontends()
    ended = [view(str(at), at) for at in range(2 * MAX_ENDED)]
    known.take(told(0.0, 5000.0, ended, []), 1.0)
    known.take(told(0.0, 5000.0, ended, []), 1.1)
    assert known.since_s() == {"frontend/1": 5000.0}
    assert [one.id for one in known.take_fresh()] == [one.id for one in ended[MAX_ENDED:]]
    assert known.take_fresh() == ()
    assert [one.id for one in known.with_ended([view("own", 1e6)])] == [one.id for one in ended[MAX_ENDED + 1 :]] + [
        "own"
    ]


def test_an_answer_goes_to_frontends_alone() -> None:
    sent: list[tuple[Identity, Struct]] = []
    worker = Identity(Role.WORKER, 0)

    def send(peer: Identity, message: Struct) -> bool:
        sent.append((peer, message))
        return True

    answer = msgspec.structs.replace(told(0.0, 0.0, [], []), asker=worker)
    assert pass_on(Identity(Role.FRONTEND, 1), answer, [], send)
    assert not sent
    assert not pass_on(ASKER, AskProcesses(), [ASKER], send)
