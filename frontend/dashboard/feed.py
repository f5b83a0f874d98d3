"""The dashboard's events: one snapshot at most every PERIOD_S, which all watchers share, and only while some are due.

A watcher that takes nothing of its events for STALL_S is dropped; one that is slow gets the newest event, and not those between.
Owned by io.py.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from meshlm.frontend.choice import Choice
from meshlm.frontend.dashboard import requests
from meshlm.frontend.dashboard.others import OtherFrontends
from meshlm.frontend.dashboard.snapshot import Facts, Known, Snapshots, news_view
from meshlm.frontend.errors import HttpError
from meshlm.frontend.responses import Response
from meshlm.protocol.control_edge import AskProcesses, AskRequests, FrontendRequests, MeshProcesses, MeshStats, News
from meshlm.protocol.dashboard import History, Snapshot
from meshlm.protocol.ids import Role

PERIOD_S = 0.1
MAX_SHARE = 0.005  # of a core, for making snapshots: where one takes longer than half a millisecond, fewer are made
PROCESSES_EVERY_S = 0.2
STATS_EVERY_S = 0.5
OTHERS_EVERY_S = 0.5  # other frontends tell of their requests
STALL_S = 10.0
ANSWER_S = 0.5  # that the supervisor and the other frontends have for an answer
MAX_NEWS = 64

_encode = msgspec.json.Encoder().encode


class Source(Protocol):
    """The part of the frontend that is shown."""

    num_open: int

    async def fresh_stats(self) -> MeshStats: ...
    def tell_supervisor(self, message: Struct) -> None: ...
    def open_choices(self) -> Iterable[Choice]: ...


class Watcher:
    """One stream of events, the newest each `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.due_at = every_s, 0.0
        self._event: bytes | None = None
        self._came = asyncio.Event()

    def offer(self, event: bytes | None) -> None:
        """The newest event; None is the end."""
        self._event = event
        self._came.set()

    async def next(self) -> bytes | None:
        await self._came.wait()
        self._came.clear()
        return self._event


class Feed:
    """See the module docstring. `limit`: watchers at a time."""

    def __init__(self, source: Source, facts: Facts, limit: int) -> None:
        self._source, self._frontend, self._limit = source, facts.frontend, limit
        self._snapshots = Snapshots(facts)
        self._ended, self._others = requests.EndedLog(), OtherFrontends()
        self._watchers: list[Watcher] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats = MeshStats(False, "starting")
        self._mesh = MeshProcesses(())  # as the supervisor said last
        self._news: deque[News] = deque(maxlen=MAX_NEWS)
        self._mesh_at = 0.0
        self._answered = asyncio.Event()
        self._closed = False

    # --- what happens ---

    def ended(self, answer: Response, path: str, status: int) -> None:
        """A request has its answer, or its client has left."""
        if (noted := requests.ended(answer, path, status, time.monotonic())) is not None:
            self._ended.add(noted)

    def first_token(self, seconds: float) -> None:
        self._snapshots.ttft.observe(seconds, time.monotonic())

    def interval(self, seconds: float, times: int) -> None:
        """So much time was between tokens, so many times."""
        self._snapshots.itl.observe(seconds, time.monotonic(), times)

    # --- who watches ---

    def join(self, every_s: float = PERIOD_S) -> Watcher:
        """HttpError when there are too many already."""
        if self._closed:
            raise HttpError(503, "this server is stopping", kind="overloaded_error")
        if len(self._watchers) >= self._limit:
            text = f"{self._limit} dashboards are open at this frontend already (--max-dashboards)"
            raise HttpError(503, text, kind="overloaded_error")
        watcher = Watcher(every_s)
        self._watchers.append(watcher)
        if len(self._watchers) == 1:
            self._ended.take_fresh(), self._others.take_fresh()  # they are in /dashboard/history
            for task in self._tasks:
                task.cancel()
            self._begin(self._make())
            self._begin(self._ask())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.remove(watcher)

    def close(self) -> None:
        """All streams end: this frontend does."""
        self._closed = True
        for watcher in self._watchers:
            watcher.offer(None)

    def told(self, message: MeshProcesses | AskRequests | FrontendRequests) -> None:
        """The supervisor's answer, another frontend's, or its question."""
        match message:
            case MeshProcesses():
                self._mesh, self._mesh_at = message, time.monotonic()
                self._news.extend(message.news)
                self._answered.set()
            case FrontendRequests():
                self._others.take(message, time.monotonic())
                self._answered.set()
            case AskRequests() if message.asker is not None:
                since_s = message.since_s.get(self._frontend, 0.0)
                until_s, ended = self._ended.later_than(since_s)
                running = requests.running(self._source.open_choices(), time.monotonic())
                self._source.tell_supervisor(
                    FrontendRequests(
                        self._frontend, message.asker, since_s, until_s, self._ended.num_ended, ended, running
                    )
                )

    async def history(self) -> bytes:
        """What came before the events, as JSON."""
        asked_at = time.monotonic()
        self._ask_processes()
        self._ask_others()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not self._all_have_told(asked_at):
                    self._answered.clear()
                    await self._answered.wait()
        news = tuple(map(news_view, self._news))
        num_ended = self._ended.num_ended + self._others.num_ended
        return _encode(History(num_ended, self._others.with_ended(self._ended.all()), news))

    def _all_have_told(self, since: float) -> bool:
        """Whether the supervisor and the frontends that it knows have answered."""
        frontends = [one for one in self._mesh.processes if one.identity.role is Role.FRONTEND and one.state == "ready"]
        others = [str(one.identity) for one in frontends if str(one.identity) != self._frontend]
        return self._mesh_at >= since and self._others.have_told(others, since)

    def _ask_processes(self) -> None:
        self._source.tell_supervisor(AskProcesses(self._news[-1].at_s if self._news else 0.0))

    def _ask_others(self) -> None:
        self._source.tell_supervisor(AskRequests(self._others.since_s()))

    # --- while somebody watches ---

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _is_watched(self) -> bool:
        return bool(self._watchers) and not self._closed

    async def _ask(self) -> None:
        """The ranks' figures, which may take a while to come when a process is stuck."""
        while self._is_watched:
            self._stats = await self._source.fresh_stats()
            await asyncio.sleep(STATS_EVERY_S)

    async def _make(self) -> None:
        pause_s, asked_at, others_at = PERIOD_S, 0.0, 0.0
        while self._is_watched:
            if time.monotonic() - others_at >= OTHERS_EVERY_S:
                others_at = time.monotonic()
                self._ask_others()
            if time.monotonic() - asked_at >= PROCESSES_EVERY_S:
                asked_at = time.monotonic()
                self._ask_processes()
            await asyncio.sleep(pause_s)
            now, begun = time.monotonic(), time.thread_time()
            if due := [watcher for watcher in self._watchers if watcher.due_at <= now]:
                event = b"data: " + _encode(self._snapshot()) + b"\n\n"
                for watcher in due:
                    watcher.due_at = now + watcher.every_s - PERIOD_S / 2  # turns of this loop are not exact
                    watcher.offer(event)
                pause_s = max(PERIOD_S, (time.thread_time() - begun) / MAX_SHARE)

    def _snapshot(self) -> Snapshot:
        known = Known(
            stats=self._stats,
            mesh=self._mesh,
            news=self._news,
            choices=self._source.open_choices(),
            others=self._others,
            num_open=self._source.num_open,
            num_watchers=len(self._watchers),
            num_ended=self._ended.num_ended + self._others.num_ended,
            ended=self._ended.take_fresh() + self._others.take_fresh(),
        )
        return self._snapshots.make(known, time.monotonic(), time.time())
