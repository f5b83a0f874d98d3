"""The dashboard's events: made only while somebody watches, once for all, and never waiting for a watcher."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from meshlm.frontend.dashboard import feed as feeds
from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.dashboard.snapshot import Facts
from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.dashboard import Snapshot
from meshlm.protocol.edges.control import MeshProcesses, MeshStats, ProcessReport
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.process.figures import Figures

LIMIT_S = 10


class Source:
    """A frontend that counts how often it was asked."""

    num_open = 3

    def __init__(self) -> None:
        self.num_asked = self.num_looked = 0
        self.figures = Figures()
        self.figures.take(MeshStats(True, num_held=5))

    def tell_supervisor(self, message: Struct) -> None:
        self.num_asked += 1

    def open_choices(self) -> list[Any]:
        self.num_looked += 1
        return []


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(feeds, "PERIOD_S", 0.005)
    monkeypatch.setattr(feeds, "STEADY_S", 0.005)
    return Source()


def feed_of(source: Source, limit: int = 3) -> Feed:
    return Feed(source, Facts("frontend/0", "1", "m"), limit)


async def next_of(watcher: Any) -> Any:
    event = await asyncio.wait_for(watcher.next(), LIMIT_S)
    return event and msgspec.json.decode(event.removeprefix(b"data: ").strip(), type=Snapshot)


async def test_all_watchers_share_one_snapshot(source: Source) -> None:
    feed = feed_of(source)
    one, other = feed.join(), feed.join()
    first, same = await next_of(one), await next_of(other)
    assert first == same
    assert (first.num_watchers, first.num_open) == (2, 3)
    while (await next_of(one)).num_held != 5:
        pass
    assert source.num_looked == (await next_of(one)).number - 1 or source.num_looked >= 2
    feed.close()


async def test_nothing_is_made_while_nobody_watches(source: Source) -> None:
    feed = feed_of(source)
    await asyncio.sleep(0.02)
    assert (source.num_asked, source.num_looked) == (0, 0)
    watcher = feed.join()
    await next_of(watcher)
    feed.leave(watcher)
    while feed._tasks:
        for task in list(feed._tasks):
            task.cancel() if task.get_coro().__name__ == "_ask" else await asyncio.wait_for(task, LIMIT_S)  # type: ignore[union-attr]
        await asyncio.sleep(0)
    looked = source.num_looked
    await asyncio.sleep(0.02)
    assert source.num_looked == looked
    again = feed.join()
    assert await next_of(again) is not None, "who comes later has it begun again"
    feed.close()


async def test_snapshots_that_cost_much_are_made_seldom(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MAX_SHARE", 0.1)
    spent = 0.0

    def costly() -> list[Any]:
        nonlocal spent
        spent += 0.02
        return []

    monkeypatch.setattr(source, "open_choices", costly)
    monkeypatch.setattr(time, "thread_time", lambda: spent)
    feed = feed_of(source)
    watcher = feed.join()
    events = [await next_of(watcher) for _ in range(3)]
    assert events[-1].at_s - events[0].at_s > 2 * 0.18, "20 ms each, and a tenth of a core at most"
    feed.close()


STARTING = ProcessReport(Identity(Role.WORKER, 0), Incarnation(1), 7, "starting", 0.0, 1, "weights")


@pytest.mark.parametrize(
    "amiss", [MeshProcesses((STARTING,)), MeshProcesses((), missing="rank 1"), MeshStats(False, "no scheduler")]
)
async def test_while_something_heals_events_come_soon_after_one_another(
    source: Source, monkeypatch: pytest.MonkeyPatch, amiss: MeshProcesses | MeshStats
) -> None:
    monkeypatch.setattr(feeds, "STEADY_S", 2 * LIMIT_S)
    feed = feed_of(source)
    source.figures.take(amiss) if isinstance(amiss, MeshStats) else feed.told(amiss)
    watcher = feed.join()
    numbers = [(await next_of(watcher)).number for _ in range(3)]
    assert numbers == [1, 2, 3]
    feed.close()


async def test_a_moment_without_service_is_seen_before_the_next_event_would_be_due(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "STEADY_S", 2 * LIMIT_S)
    feed = feed_of(source)
    feed.unsettled()  # long before anybody watches, and over
    monkeypatch.setattr(feeds, "SETTLES_S", 0.05)
    feed.unsettled()
    watcher = feed.join()
    first = await next_of(watcher)
    feed.unsettled()
    assert (await next_of(watcher)).number > first.number
    feed.close()


async def test_who_wants_fewer_events_gets_fewer(source: Source) -> None:
    feed = feed_of(source)
    seldom = feed.join(every_s=0.1)
    first, second = await next_of(seldom), await next_of(seldom)
    assert second.at_s - first.at_s > 0.08
    assert second.number == first.number + 1, "nothing is made between"
    assert source.num_looked == 2
    feed.close()


async def test_one_watcher_too_many_is_refused_by_name(source: Source) -> None:
    feed = feed_of(source, limit=2)
    one, _ = feed.join(), feed.join()
    with pytest.raises(HttpError, match=r"2 dashboards are open .*--max-dashboards") as refusal:
        feed.join()
    assert refusal.value.status == 503
    feed.leave(one)
    feed.join()
    feed.close()


async def test_a_slow_watcher_gets_the_newest_event_and_holds_no_others(source: Source) -> None:
    feed = feed_of(source)
    slow, quick = feed.join(), feed.join()
    numbers = [(await next_of(quick)).number for _ in range(5)]
    assert numbers == sorted(numbers)
    assert (await next_of(slow)).number >= numbers[-1]
    feed.close()


async def test_the_end_of_the_frontend_ends_all_streams(source: Source) -> None:
    feed = feed_of(source)
    watcher = feed.join()
    feed.close()
    assert await next_of(watcher) is None
    with pytest.raises(HttpError, match="stopping"):
        feed.join()
