"""The dashboard's events: snapshots that all watchers share, made only while some are due.

While all is as it should be there is one each STEADY_S, or as often as a watcher asks. From the moment that a process is not ready, or
the mesh does not serve, until SETTLES_S after that there is one each PERIOD_S, for those who watch it heal.
A watcher that takes nothing of its events for STALL_S is dropped; one that is slow gets the newest event, and not those between.
Owned by io.py.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec import Struct

from meshlm.frontend.dashboard import requests
from meshlm.frontend.dashboard.snapshot import Facts, Known, Snapshots, news_view
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.responses import Response
from meshlm.protocol.dashboard import History
from meshlm.protocol.edges.control import AskProcesses, AskRequests, FrontendRequests, MeshProcesses, News
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.process.figures import Figures

PERIOD_S, STEADY_S = 0.1, 0.5
SETTLES_S = 1.0
MAX_SHARE = 0.005  # of a core, for making snapshots: where one takes longer than half a millisecond, fewer are made
HEALING_EVERY_S, PROCESSES_EVERY_S = 0.2, 1.0  # the supervisor is asked for the states of processes
OTHERS_EVERY_S = 0.5  # other frontends tell of their requests ...
LONELY_EVERY_S = 5.0  # ... or whether there are any
STALL_S = 10.0
ANSWER_S = 0.5  # that the supervisor and the other frontends have for an answer
MAX_NEWS = 64

_encode = msgspec.json.Encoder().encode


class Source(Protocol):
    """The part of the frontend that is shown."""

    figures: Figures

    @property
    def num_open(self) -> int: ...

    def tell_supervisor(self, message: Struct) -> None: ...
    def open_choices(self) -> Iterable[Choice]: ...


class Watcher:
    """One stream of events, the newest each `every_s` seconds; 0: each that is made."""

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
    """The events of one frontend. `limit`: watchers at a time."""

    def __init__(self, source: Source, facts: Facts, limit: int) -> None:
        self._source, self._frontend, self._limit = source, facts.frontend, limit
        self._snapshots = Snapshots(facts)
        self._ended, self._others = requests.EndedLog(), requests.OtherFrontends()
        self._watchers: list[Watcher] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._mesh = MeshProcesses(())  # as the supervisor said last
        self._news: deque[News] = deque(maxlen=MAX_NEWS)
        self._mesh_at = self._settled_at = 0.0
        self._cost_s = 0.0  # of a snapshot, of late
        self._answered = asyncio.Event()
        self._hurry = asyncio.Event()  # the mesh has just stopped serving
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

    def join(self, every_s: float = 0.0) -> Watcher:
        """HttpError when there are too many already. every_s: see Watcher; where it is less than STEADY_S more are made."""
        if self._closed:
            raise HttpError(503, "this server is stopping")
        if len(self._watchers) >= self._limit:
            text = f"{self._limit} dashboards are open at this frontend already (--max-dashboards)"
            raise HttpError(503, text)
        watcher = Watcher(every_s)
        self._watchers.append(watcher)
        if len(self._watchers) == 1:
            self._ended.take_fresh(), self._others.take_fresh()  # they are in /dashboard/history
            for task in self._tasks:
                task.cancel()
            task = asyncio.ensure_future(self._make())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
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
                if message.missing or any(one.state != "ready" for one in message.processes):
                    self._settled_at = self._mesh_at + SETTLES_S
                self._answered.set()
            case FrontendRequests():
                self._others.take(message, time.monotonic())
                self._answered.set()
            case AskRequests() if message.asker is not None:
                since_s = message.since_s.get(self._frontend, 0.0)
                until_s, ended = self._ended.later_than(since_s)
                now, times = time.monotonic(), self._snapshots
                self._source.tell_supervisor(
                    FrontendRequests(
                        frontend=self._frontend,
                        asker=message.asker,
                        since_s=since_s,
                        until_s=until_s,
                        num_ended=self._ended.num_ended,
                        ended=ended,
                        running=requests.running(self._source.open_choices(), now),
                        num_open=self._source.num_open,
                        ttft=times.ttft.buckets(now),
                        itl=times.itl.buckets(now),
                    )
                )

    def unsettled(self) -> None:
        """The mesh does not serve, says the coordinator: a process may be back before the next snapshot would be due."""
        self._settled_at = time.monotonic() + SETTLES_S
        self._hurry.set()

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

    async def _make(self) -> None:
        asked_at = others_at = 0.0
        while self._watchers and not self._closed:
            now = time.monotonic()
            if not self._source.figures.now.serving:  # the coordinator says it at once
                self._settled_at = now + SETTLES_S
            steady = now >= self._settled_at
            if now - others_at >= (OTHERS_EVERY_S if self._others.any else LONELY_EVERY_S):
                others_at = now
                self._ask_others()
            if now - asked_at >= (PROCESSES_EVERY_S if steady else HEALING_EVERY_S) - PERIOD_S / 2:
                asked_at = now
                self._ask_processes()
            asked_s = min((watcher.every_s for watcher in self._watchers if watcher.every_s), default=STEADY_S)
            if steady:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(min(STEADY_S, asked_s), self._cost_s / MAX_SHARE)):
                        await self._hurry.wait()
            else:
                await asyncio.sleep(max(PERIOD_S, self._cost_s / MAX_SHARE))
            self._hurry.clear()
            self._offer(time.monotonic())

    def _offer(self, now: float) -> None:
        """Those whose turn it is get a snapshot."""
        if due := [watcher for watcher in self._watchers if watcher.due_at <= now]:
            begun = time.thread_time()
            event = b"data: " + self._snapshot() + b"\n\n"
            for watcher in due:
                watcher.due_at = now + watcher.every_s - PERIOD_S / 2  # turns of the loop are not exact
                watcher.offer(event)
            spent_s = time.thread_time() - begun
            self._cost_s = self._cost_s + (spent_s - self._cost_s) / 4 if self._cost_s else spent_s

    def _snapshot(self) -> bytes:
        known = Known(
            stats=self._source.figures.now,
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
