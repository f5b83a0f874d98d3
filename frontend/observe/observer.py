"""What is told of this frontend's requests: metrics, traces, statistics, rate limits, the dashboard and log lines. Owned by io.py."""

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import structlog

from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.frontend.observe.requests import RequestLog, observe_end, observe_tokens
from meshlm.frontend.observe.stat_loggers import StatLoggers, ended_request
from meshlm.frontend.openai.responses import Response
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.control import MeshStats
from meshlm.protocol.edges.text import TextDeltas
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process import metrics as shared_metrics

if TYPE_CHECKING:  # prometheus_client must not be imported before its directory is set
    from meshlm.frontend.observe.metrics import Metrics
    from meshlm.frontend.observe.traces import Traces

SERIES_FROM_START = 16  # engines whose series are there before their first request
Scrape = Callable[[MeshStats, str], Awaitable[bytes]]


class Observer:
    """Hears of each request's end, and of all tokens."""

    feed: Feed

    def __init__(self, client: MeshClient) -> None:
        self._client = client
        self.rates = RateLimits("")
        self.stat_loggers = StatLoggers(structlog.get_logger())
        self._log = RequestLog()
        self._traces: Traces | None = None

    def start(self, mesh: Mesh, resolved: Resolved, version: str, feed: Feed) -> None:
        config = mesh.config
        self.feed, self._resolved = feed, resolved
        self.rates = RateLimits(config.run.run_dir)
        self._metrics, self._scrape = _start_metrics(config, resolved, mesh.log)
        if config.observability.otlp_traces_endpoint:
            from meshlm.frontend.observe.traces import Traces  # an extra, and 100 ms

            self._traces = Traces(config.observability, str(mesh.identity), version, mesh.log)

    @property
    def _mesh(self) -> Mesh:
        assert self._client.mesh is not None
        return self._client.mesh

    def refused(self, error: HttpError, seconds: float = 0.0) -> None:
        """A request for an answer got this error; by its head alone so long after that began to come."""
        self._metrics.refused(error.reason())
        if seconds:
            self._metrics.refusal.observe(seconds)

    def ignored(self, unknown_fields: tuple[str, ...], path: str) -> None:
        self._log.ignored(self._mesh.log, unknown_fields, path)

    def done(self, answer: Response, started: float, path: str, status: int) -> None:
        self.flush()
        self._observe(observe_end(self._metrics, answer, self._resolved.max_model_len))
        self.feed.ended(answer, path, status)
        if self._traces is not None:
            self._traces.ended(answer, path, status, time.monotonic(), time.time())
        self.ignored(answer.parsed_request.unknown_fields, path)
        self.rates.ended(answer)
        seconds = time.monotonic() - started
        if self.stat_loggers:
            self.stat_loggers.ended(ended_request(answer, seconds, path, status))
        config = self._mesh.config
        if not config.server.disable_log_requests:
            self._log.ended(self._mesh.log, answer, seconds, path, status, config.run.log_requests_per_s)

    def _observe(self, turns: Iterator[None]) -> None:
        for _ in turns:
            self._mesh.call_soon_threadsafe(self._observe, turns)
            break

    def flush(self) -> None:
        """The metrics get what came since the last call."""
        observe_tokens(self._metrics, self._client.tracker, self.feed)

    def mesh_stats(self, stats: MeshStats) -> None:
        if self._client.mesh is not None:
            self._metrics.mesh(stats)
            if not stats.serving:
                self.feed.unsettled()
        self.stat_loggers.record(stats)

    def written(self, message: TextDeltas, begin_ns: int) -> None:
        """The chunks of these rows are written; they came at `begin_ns`."""
        if message.timings_ns and self._client.mesh is not None:
            self._metrics.written(message.timings_ns[-1], time.monotonic_ns())
            if self._mesh.timeline.on:
                step, planned_ns, *_ = message.timings_ns
                self._mesh.timeline.note("write", "loop", begin_ns, flow=planned_ns, facts={"step": step})

    async def scrape(self, stats: MeshStats) -> bytes:
        self.flush()
        return await self._scrape(stats, self._resolved.served_names[0])

    def close(self) -> None:
        if self._traces is not None:
            self._traces.close()


def _start_metrics(config: MeshConfig, resolved: Resolved, log: Any) -> "tuple[Metrics, Scrape]":
    """The series, begun once the directory is known in which all frontends share them; and what writes those of all frontends."""
    parallel = config.parallel
    if why := shared_metrics.prepare(config.run.run_dir, parallel.data_parallel_size):
        log.warning("metrics are of this frontend alone", reason=why)
    from meshlm.frontend.observe import metrics  # after the directory is set

    first = parallel.data_parallel_rank or 0
    engines = range(first, first + min(parallel.data_parallel_size, SERIES_FROM_START))
    named, most = resolved.served_names[0], resolved.max_model_len
    return metrics.Metrics(named, most, engines, metrics.cache_config(config)), metrics.scrape
