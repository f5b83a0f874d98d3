"""What is told of this frontend's requests: metrics, traces, statistics, rate limits, the dashboard, recordings and log
lines. Owned by io.py.

As in vLLM each sequence is a request of its own; `n` and the longest choice are observed once for each prompt. A request that was
refused is observed nowhere, and one without a token has no latency. Where the client left a sequence is counted as aborted, with its
latency up to the last token that came, since its tokens count, too. With an Idempotency-Key it goes on without its client: the
connection that sees its end counts it.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import structlog

from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.frontend.observe.recorder import Recorder
from meshlm.frontend.observe.stat_loggers import EndedRequest, StatLoggers
from meshlm.frontend.openai.responses import Response
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.control import MeshStats
from meshlm.protocol.edges.text import TextDeltas
from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.client.request_tracker import RequestTracker
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process import metrics as shared_metrics
from meshlm.runtime.process.readable import readable

if TYPE_CHECKING:  # prometheus_client must not be imported before its directory is set
    from meshlm.frontend.observe.metrics import Metrics
    from meshlm.frontend.observe.traces import Traces

CHOICES_AT_ONCE = 256  # a millisecond or two
# Of a request that was let in; all else refuses it.
_FAILURES = (ErrorKind.INTERNAL, ErrorKind.TIMEOUT, ErrorKind.POISON)
MAX_REASONS = 16  # that are told one by one; of more choices the line tells how many ended by which
MAX_UNKNOWN_SEEN, MAX_FIELD_NAME = 1000, 64  # fields that are named once in the log, and how much of each
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
        self._recorder: Recorder | None = None

    def start(self, mesh: Mesh, resolved: Resolved, version: str, feed: Feed) -> None:
        config = mesh.config
        self.feed, self._resolved = feed, resolved
        self.rates = RateLimits(config.run.run_dir)
        self._metrics, self._scrape = _start_metrics(config, resolved, mesh.log)
        if config.server.record_requests:
            self._recorder = Recorder(config.server, resolved, mesh.identity, mesh.log)
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
        if self._recorder is not None:
            self._recorder.ended(answer, path)
        self.ignored(answer.parsed_request.unknown_fields, path)
        usage, seconds = answer.usage(), time.monotonic() - started
        self.rates.used(answer.parsed_request.api_key, usage["prompt_tokens"] + usage["completion_tokens"])
        if self.stat_loggers:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
            self.stat_loggers.ended(EndedRequest(answer.request_id, path, status, round(seconds, 6), *counts))
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
        if self._recorder is not None:
            self._recorder.close()
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
    scrape = metrics.scrape_as_vllm if config.observability.metrics_prefix == "vllm" else metrics.scrape
    return metrics.Metrics(named, most, engines, metrics.cache_config(config)), scrape


def observe_tokens(metrics: "Metrics", tracker: RequestTracker, feed: Feed) -> None:
    """Observes what came since the last call: first tokens, the times between tokens, their number. The dashboard has them too."""
    begun, counts = tracker.take_counts()
    prompt_tokens: dict[str, tuple[int, int]] = {}  # and those of them that were cached
    for choice in begun:
        metrics.engine(choice.engine).ttft.observe(choice.first_at - choice.opened_at)
        feed.first_token(choice.first_at - choice.opened_at)
        before, cached = prompt_tokens.get(choice.engine, (0, 0))
        prompt_tokens[choice.engine] = before + choice.num_prompt_tokens, cached + _num_cached(choice)
    for name, (count, cached) in prompt_tokens.items():
        metrics.engine(name).prefilled(count, cached)
    for name, came in counts.items():
        engine = metrics.engine(name)
        for interval, times in came.intervals.items():
            engine.itl.observe(interval, times)
            feed.interval(interval, times)
        if came.num_tokens:
            engine.generation_tokens.inc(came.num_tokens)
    metrics.flush()


def observe_end(metrics: "Metrics", answer: Response, max_model_len: int) -> Iterator[None]:
    """The HTTP request is over, by its answer or since its client left. Yields where others may have their turn."""
    whole: dict[int, list[Choice]] = {}
    for number, choice in enumerate(answer.choices, 1):
        if number % CHOICES_AT_ONCE == 0:
            yield
        finished, engine = choice.finished, metrics.engine(choice.engine)
        retries = choice.submit.retry is not None
        # An earlier connection had all of it, and counted it.
        was_told = retries and 0 < len(choice.token_ids) <= choice.num_told
        if (finished is None and retries) or was_told or _was_refused(choice):
            continue
        engine.finished(FinishReason.ABORT if finished is None else finished.reason)
        if choice.first_at:
            _observe_sequence(metrics, answer, choice, max_model_len)
            whole.setdefault(choice.prompt_index, []).append(choice)
    for choices in whole.values():
        if len(choices) == answer.parsed_request.mesh.num_choices:
            engine = metrics.engine(choices[0].engine)
            engine.n.observe(answer.parsed_request.answer.num_returned)
            engine.longest.observe(max(len(choice.token_ids) for choice in choices))
    metrics.flush()


def _observe_sequence(metrics: "Metrics", answer: Response, choice: Choice, max_model_len: int) -> None:
    engine, num_tokens = metrics.engine(choice.engine), len(choice.token_ids)
    retry, decode_s = choice.submit.retry, choice.last_at - choice.first_at
    before_s = max(0.0, choice.submit.arrival_s - retry.begun_s) if retry is not None and retry.begun_s else 0.0
    engine.e2e.observe(before_s + choice.last_at - choice.opened_at)
    engine.prompt.observe(choice.num_prompt_tokens)
    engine.generation.observe(num_tokens)
    engine.computed.observe(choice.num_prompt_tokens - _num_cached(choice))
    if not answer.parsed_request.answer.prompt_only:
        engine.max_tokens.observe(answer.parsed_request.mesh.max_tokens or max_model_len - choice.num_prompt_tokens)
    if choice.num_told:
        return  # the tokens came once more, all at once
    if num_tokens > 1:
        engine.tpot.observe(decode_s / (num_tokens - 1))
    if choice.first is not None:
        engine.phases(choice.first, decode_s)


def _num_cached(choice: Choice) -> int:
    """Its prompt tokens that its rank had computed before."""
    return max(0, choice.first.num_cached_tokens) if choice.first is not None else 0


def _was_refused(choice: Choice) -> bool:
    """Whether it was refused after its submission: by its prompt's length, a full queue, or a key that stands for another request."""
    end = choice.finished
    return end is not None and end.reason is FinishReason.ERROR and end.kind not in _FAILURES and not choice.first_at


class RequestLog:
    """What the log says of requests: one line for each, and one for each field that nobody knows. `log` is the process's.

    Under load it is one line for some of them (--log-requests-per-s), which says how many had none; those that failed have one always.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._unknown_seen: set[str] = set()
        self._clock = clock
        # Lines that may be written now, since when, and that were left out.
        self._lines, self._filled_at, self._left_out = 1.0, clock(), 0

    def ignored(self, log: Any, unknown_fields: tuple[str, ...], path: str) -> None:
        for field in unknown_fields:
            name = readable(field, MAX_FIELD_NAME)
            if name not in self._unknown_seen and len(self._unknown_seen) < MAX_UNKNOWN_SEEN:
                self._unknown_seen.add(name)
                log.warning("unknown request field ignored", field=name, path=path)

    def _has_line(self, per_s: float) -> bool:
        """Whether there is a line left for a request that ended well. A second's worth may be used at once."""
        now = self._clock()
        self._lines = min(max(per_s, 1.0), self._lines + (now - self._filled_at) * per_s)
        self._filled_at = now
        if self._lines < 1:
            self._left_out += 1
            return False
        self._lines -= 1
        return True

    def ended(self, log: Any, answer: Response, seconds: float, path: str, status: int, per_s: float) -> None:
        if not self._has_line(per_s) and status == 200 and answer.error is None:
            return
        more = {"left_out": self._left_out} if self._left_out else {}
        self._left_out = 0
        usage = answer.usage()
        ended = [choice.finished.reason if choice.finished else FinishReason.ABORT for choice in answer.choices]
        reasons: Any = [reason.value for reason in ended]
        if len(reasons) > MAX_REASONS:
            reasons = dict(Counter(reasons))
        log.info(
            "request",
            id=answer.request_id,
            path=path,
            status=status,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            output_tokens=usage["completion_tokens"],
            finish_reason=reasons[0] if len(ended) == 1 else reasons,
            seconds=round(seconds, 3),
            error=answer.error.message if answer.error else None,
            **more,
        )
