"""The frontend's links, server and clock."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct

from meshlm import __version__
from meshlm.frontend import plugins
from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.dashboard.snapshot import Facts
from meshlm.frontend.http.budget import Budget
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.listener import HttpListener, Listener
from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.frontend.observe import metrics_start, request_metrics
from meshlm.frontend.observe.request_log import RequestLog
from meshlm.frontend.observe.stat_loggers import StatLoggers, ended_request
from meshlm.frontend.openai.parse import ParsedRequest
from meshlm.frontend.openai.responses import Response
from meshlm.frontend.operator.scaling import AskedRanks
from meshlm.frontend.readiness import STOPPING, Readiness
from meshlm.frontend.requests import submits
from meshlm.frontend.requests.choice import Choice
from meshlm.frontend.requests.poison import PoisonBodies
from meshlm.frontend.requests.questions import FULL, Questions
from meshlm.protocol.edges.control import (
    AskRequests,
    ChangeSettings,
    Died,
    FrontendRequests,
    MeshProcesses,
    MeshStats,
    OpenRequests,
    QueueFull,
    RanksScaled,
    Refuse,
    SetRanks,
    Shutdown,
)
from meshlm.protocol.edges.text import (
    Accepted,
    Detokenize,
    DetokenizeReply,
    Rejected,
    Submit,
    TextDeltas,
    Tokenize,
    TokenizeReply,
)
from meshlm.protocol.operations import Action, OperationDone
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Incarnation, Role
from meshlm.runtime import io_processors
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong, ProcessFatal
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.mesh.operations import AskedOperations
from meshlm.runtime.process.about import about
from meshlm.runtime.process.deaths import allowed
from meshlm.runtime.process.events import Send

if TYPE_CHECKING:
    from meshlm.frontend.observe.traces import Traces

TICK_S = 1.0
ASK_TIMEOUT_S = 30.0
MOVED_S = 0.1


class FrontendApp(Readiness):
    """See `meshlm.runtime.process.process.App`; also the routes' Backend."""

    version = __version__

    def __init__(self) -> None:
        super().__init__()
        self._questions = Questions()
        self._operations: AskedOperations | None = None
        self.ranks = AskedRanks(self.tell_supervisor)
        self._listener: Listener | None = None
        self._is_stopping = False
        self._handing_over = False
        self._closed = asyncio.Event()  # set whenever a request ends
        self._ticks = 0
        self._traces: Traces | None = None
        self._log = RequestLog()
        self.rates = RateLimits("")
        self.poison = PoisonBodies()
        self.io_processor: io_processors.IOProcessor | None = None
        self._stat_loggers = StatLoggers(structlog.get_logger())
        self._budget = Budget(0)
        self._places_later = False
        self._moved = asyncio.Event()  # a sequence began or ended

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._mesh, self.config = mesh, mesh.config
        self._operations, self._questions.asker = AskedOperations(mesh.send), mesh.identity
        self.rates = RateLimits(mesh.config.run.run_dir)
        self.draws = submits.draws_of(mesh.config.model.seed, mesh.identity.index)
        if mesh.config.resolved is None:
            raise ProcessFatal("the configuration is not resolved")
        self.resolved = mesh.config.resolved
        self._renders_only = self.resolved.renders_only
        server = mesh.config.server
        self.io_processor = plugins.load(mesh.config, mesh.identity.index, self._stat_loggers, os.environ)
        self._tracker.num_detokenizers = mesh.config.server.detokenizers
        self._budget = Budget(mesh.config.server.max_concurrent_bytes)
        self._tracker.max_deaths = allowed(mesh.config.run.max_restarts)
        self._metrics, self._scrape = metrics_start.begun(mesh.config, self.resolved, mesh.log)
        if mesh.config.observability.otlp_traces_endpoint:
            from meshlm.frontend.observe.traces import Traces  # an extra, and 100 ms

            self._traces = Traces(mesh.config.observability, str(mesh.identity), self.version, mesh.log)
        facts = Facts(str(mesh.identity), self.version, self.resolved.served_names[0])
        self.feed = Feed(self, facts, server.max_dashboards)
        self._listener = self._make_listener()
        try:
            await self._listener.start()
        except OSError as error:
            raise ProcessFatal(f"--host {server.address} --port {server.port}: {error.strerror}") from None
        assert self._listener.serving is not None
        self._listener.serving.add_done_callback(self._served)
        self._tick()
        return {"listening on": f"{server.address}:{server.port}"}

    def _make_listener(self) -> Listener:
        if not self.config.server.grpc:
            return HttpListener(self)
        from meshlm.frontend.grpc.listener import GrpcListener  # an extra, and 40 ms

        return GrpcListener(self)

    def _served(self, serving: "asyncio.Task[None]") -> None:
        """Ends the process when its server ends: it would be alive and do nothing."""
        error = None if serving.cancelled() else serving.exception()
        if self._mesh is not None and (error is not None or not self._is_stopping):
            self._mesh.fatal(f"the server ended: {error or 'nobody asked it to'}")

    def _tick(self) -> None:
        assert self._mesh is not None
        self._mesh.call_later(TICK_S, self._tick)  # first: one that fails is not the last
        self._ticks += 1
        self._flush()
        self._send(self._tracker.expire(time.time()))
        self._tracker.expire_orphans(time.monotonic())

    def _place_later(self) -> None:
        """Places the rest of the choices that wait for a detokenizer in later turns of the loop."""
        if self._tracker.places_more and not self._places_later and self._mesh is not None:
            self._places_later = True
            self._mesh.call_soon_threadsafe(self._place)

    def _place(self) -> None:
        self._places_later = False
        self._send(self._tracker.place())

    def _send(self, sends: list[Send]) -> None:
        assert self._mesh is not None
        self._place_later()
        for send in sends:
            try:
                self._mesh.send(send.to, send.message)
            except LinkDown:
                # Its down-event follows and the choices go elsewhere.
                self._mesh.log.debug("not delivered", to=str(send.to), **about(send.message))
            except LinkFull:
                self._mesh.log.warning("queue full", to=str(send.to), **about(send.message))
                if isinstance(send.message, Submit):
                    self._send(self._tracker.rejected(Rejected(send.message.handles, ErrorKind.OVERLOADED, FULL)))
            except MessageTooLong as error:
                if isinstance(send.message, Submit):
                    kind = ErrorKind.INTERNAL if send.message.attempt else ErrorKind.INVALID
                    self._send(self._tracker.rejected(Rejected(send.message.handles, kind, str(error), "prompt")))

    # --- Backend ---

    def refused(self, error: HttpError, seconds: float = 0.0) -> None:
        """A request for an answer got this error; by its head alone so long after that began to come."""
        self._metrics.refused(error.reason())
        if seconds:
            self._metrics.refusal.observe(seconds)

    def admit(self, ask: ParsedRequest) -> int:
        """Counts the request against the budget and gives its cost, for `release`. HttpError when there is no room for it."""
        return self._budget.open(ask)

    def release(self, cost: int) -> None:
        self._budget.close(cost)

    def new_handle(self) -> Handle:
        return self._tracker.new_handle()

    def open(self, choices: list[Choice], submit: Submit) -> None:
        self.num_open += 1
        now = time.monotonic()
        for choice in choices:
            choice.opened_at = now
        self._send(self._tracker.open(choices, submit))

    def close(self, choices: list[Choice]) -> None:
        self._closed.set()
        self.num_open = max(0, self.num_open - len({choice.prompt_index for choice in choices}))
        self._tell_open()
        self._send(self._tracker.close(choices))

    def _tell_open(self) -> None:
        if self._refusing and self._mesh is not None:
            self._mesh.tell_supervisor(OpenRequests(self.num_open))

    async def moved(self) -> None:
        """Wait until some sequence has begun or ended, MOVED_S at most: one may have failed without a word from elsewhere."""
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOVED_S):
                await self._moved.wait()

    async def ask(self, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        """Asks a detokenizer. A waiting question counts towards the budget; when its client leaves (cancelled), that is told."""
        assert self._mesh is not None
        size = self._budget.open_question(message.prompt if isinstance(message, Tokenize) else message.token_ids)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                most = self._tracker.max_deaths
                return await self._questions.ask_any(message, self.any_detokenizer, self._mesh.send, most)
        except TimeoutError:
            raise HttpError(504, "the detokenizer did not answer", kind="timeout_error") from None
        finally:
            self._budget.close_question(size)

    async def operate(self, action: Action) -> OperationDone:
        """Have it done in every worker."""
        assert self._operations is not None
        try:
            return await self._operations.ask(action)
        except TimeoutError:
            raise HttpError(504, "the coordinator did not answer", kind="timeout_error") from None

    def change(self, values: dict[str, str | int | float]) -> None:
        """Ask the supervisor to have these settings in all processes. They were checked."""
        assert self._mesh is not None
        self._mesh.tell_supervisor(ChangeSettings(values))

    def ignored(self, unknown_fields: tuple[str, ...], path: str) -> None:
        assert self._mesh is not None
        self._log.ignored(self._mesh.log, unknown_fields, path)

    def done(self, answer: Response, started: float, path: str, status: int) -> None:
        """Metrics and the one log line of a request."""
        assert self._mesh is not None
        self._flush()
        self._observe(request_metrics.observe_end(self._metrics, answer, self.resolved.max_model_len))
        self.feed.ended(answer, path, status)
        if self._traces is not None:
            self._traces.ended(answer, path, status, time.monotonic(), time.time())
        self.ignored(answer.ask.unknown_fields, path)
        self.rates.ended(answer)
        if self._stat_loggers:
            self._stat_loggers.ended(ended_request(answer, time.monotonic() - started, path, status))
        if not self.config.server.disable_log_requests:
            per_s = self.config.run.log_requests_per_s
            self._log.ended(self._mesh.log, answer, time.monotonic() - started, path, status, per_s)

    def _observe(self, turns: Iterator[None]) -> None:
        assert self._mesh is not None
        for _ in turns:
            self._mesh.call_soon_threadsafe(self._observe, turns)
            break

    async def load(self) -> int:
        """Requests that run or wait in the mesh; of this frontend's own, at least all."""
        stats = await self.fresh_stats()
        return max(self.num_open, stats.num_held + sum(rank.num_running + rank.num_waiting for rank in stats.ranks))

    async def metrics(self) -> bytes:
        stats = await self.fresh_stats()
        self._flush()
        return await self._scrape(stats, self.resolved.served_names[0])

    def _flush(self) -> None:
        request_metrics.observe_tokens(self._metrics, self._tracker, self.feed)

    def tell_supervisor(self, message: Struct) -> None:
        assert self._mesh is not None
        self._mesh.tell_supervisor(message)

    def open_choices(self) -> Iterable[Choice]:
        return self._tracker.by_handle.values()

    # --- App ---

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case TextDeltas():
                begin_ns = time.monotonic_ns()
                self._send(self._tracker.deltas(message, peer, begin_ns / 1e9))
                if message.first or message.finished:
                    self._moved.set()
                if message.timings_ns and self._mesh is not None:
                    self._metrics.written(message.timings_ns[-1], time.monotonic_ns())
                    if self._mesh.timeline.on:
                        step, planned_ns, *_ = message.timings_ns
                        self._mesh.timeline.note("write", "loop", begin_ns, flow=planned_ns, facts={"step": step})
            case Accepted():
                self._tracker.accepted(message, time.monotonic())
            case Rejected():
                self._send(self._tracker.rejected(message))
            case TokenizeReply() | DetokenizeReply():
                self._questions.answered(message)
            case OperationDone() if self._operations is not None:
                self._operations.answered(message)
            case Refuse():
                self._refusing = message.on
                self._news.set()
                self._tell_open()
            case RanksScaled():
                self.ranks.answered(message)
            case ChangeSettings() | SetRanks() if self._mesh is not None:
                self.config = self._mesh.config
                self._budget.max_bytes = self.config.server.max_concurrent_bytes
            case QueueFull():
                self._queue_full = message.on
            case MeshProcesses() | AskRequests() | FrontendRequests() if self._mesh is not None:
                self.feed.told(message)
            case Shutdown(handover=True):
                self._handing_over = True
            case Died():
                self.poison.learn(message)
            case MeshStats():
                if self._mesh is not None:
                    self._metrics.mesh(message)
                    if not message.serving:
                        self.feed.unsettled()
                self.figures.take(message)
                self._stat_loggers.record(message)
                self._news.set()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if peer.role is Role.DETOKENIZER:
            sends = self._tracker.detokenizer_up(peer)
            if self._mesh is not None:  # before start() there is nothing to send
                self._send(sends)
            self._news.set()
        elif peer.role is Role.COORDINATOR and self._operations is not None:
            self._operations.coordinator_up()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if peer.role is Role.DETOKENIZER:
            named = self._mesh.in_hand_of(peer, incarnation) if self._mesh is not None else ()
            self._send(self._tracker.detokenizer_down(peer, time.monotonic(), named))
            self._questions.detokenizer_lost(peer, named)
        elif peer.role is Role.COORDINATOR:
            self._queue_full = False
            if self._operations is not None:
                self._operations.coordinator_lost()

    def flush(self) -> None:
        """Chunks are written as their rows are read."""

    def beat(self) -> tuple[int, str]:
        return self._ticks, f"{self.num_open} requests"

    def num_requests(self) -> int:
        return self.num_open

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, or leave them to other frontends; wait for the open ones."""
        self.feed.close()
        if self._handing_over and self._listener is not None:
            await self._listener.hand_over(limit_s)
            return
        self._draining = True
        self._news.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.num_open:
                    self._closed.clear()
                    await self._closed.wait()

    async def stop(self) -> None:
        """Open requests still get the reason; after a hand-over their connections break, since others serve who asks again."""
        if not self._handing_over:
            self._send(self._tracker.end_all(STOPPING))
            self._questions.fail(STOPPING)
        if self._listener is not None:
            self._is_stopping = True
            await self._listener.stop()
        if self._traces is not None:
            self._traces.close()
