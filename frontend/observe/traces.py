"""A trace of each request for an OpenTelemetry collector (--otlp-traces-endpoint).

The spans of all processes are made here, when a request has ended: the messages that it is made of carried their times, and none more
is sent. The span of the request has vLLM's name and attributes; its children are the hops, each with the process that took the time.
A collector that is away costs nothing but its spans: they wait in a queue of limited length, which a thread empties. Owned by io.py.
"""

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from meshlm.frontend.openai.responses import Response
from meshlm.protocol.config import ObservabilityConfig
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.placement import Choice

MAX_QUEUED = 4096  # spans; those beyond are dropped
MAX_SEQUENCES = 64  # of a request that have spans with --collect-detailed-traces
TIMEOUT_S = 5.0  # of one delivery
FLUSH_S = 1.0  # what waits at the end of the process has so long

NAME = "llm_request"
SAMPLED = TraceFlags(TraceFlags.SAMPLED)

Attributes = dict[str, str | int | float]


class Hop(NamedTuple):
    """Where a request was for a while, in seconds of the loop's clock."""

    name: str
    process: str
    begin: float
    end: float


def hops(choice: Choice) -> list[Hop]:
    """The road of one sequence, as far as it came. The processes told how long they had it; one follows the other."""
    first = choice.first
    if first is None or not choice.first_at:
        return []
    rank, at, found = choice.engine, choice.opened_at, []
    where = str(choice.detokenizer) if choice.detokenizer is not None else "detokenizer"
    for name, process, micros in (
        ("encode", where, first.encode_us),
        ("route", "coordinator/0", first.route_us),
        ("queue", f"scheduler/{rank}", first.queued_us),
        ("prefill", f"worker/{rank}", first.prefill_us),
    ):
        begin, at = at, at + micros / 1e6
        found.append(Hop(name, process, begin, at))
    if choice.last_at > choice.first_at:
        found.append(Hop("decode", f"worker/{rank}", choice.first_at, choice.last_at))
    return found


class _Exporter(SpanExporter):
    """Another exporter, of which the log says once that it fails, and once that it works again."""

    def __init__(self, inner: SpanExporter, endpoint: str, log: Any) -> None:
        self._inner, self._endpoint, self._log = inner, endpoint, log
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if (fails := result is not SpanExportResult.SUCCESS) != self._fails:
            self._fails = fails
            if fails:
                self._log.warning("traces are lost: their collector does not take them", endpoint=self._endpoint)
            else:
                self._log.info("the collector takes traces again", endpoint=self._endpoint)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    """As vLLM's, by OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: gRPC, or HTTP with protobuf."""
    if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=endpoint, timeout=TIMEOUT_S)


class Traces:
    """Makes the spans of this frontend's requests. `process` is its name."""

    def __init__(self, config: ObservabilityConfig, process: str, version: str, log: Any) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it says each failure, and we say one
        name = os.environ.get("OTEL_SERVICE_NAME", "meshlm")
        instance = f"{process}-{os.getpid()}"
        resource = Resource.create({"service.name": name, "service.version": version, "service.instance.id": instance})
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler  # OTEL_TRACES_SAMPLER's
        self._resource, self._scope = resource, InstrumentationScope("meshlm.frontend", version)
        self._exporter = _Exporter(_exporter(config.otlp_traces_endpoint), config.otlp_traces_endpoint, log)
        timeout_ms = TIMEOUT_S * 1e3
        self._queue = BatchSpanProcessor(self._exporter, max_queue_size=MAX_QUEUED, export_timeout_millis=timeout_ms)
        self._ids = RandomIdGenerator()
        self._propagator = TraceContextTextMapPropagator()
        self._process, self._detailed = process, bool(config.collect_detailed_traces)

    def ended(self, answer: Response, path: str, status: int, now: float, wall_s: float) -> None:
        """The request is over at `now` of the loop's clock, which is `wall_s`. What asked nothing of the mesh has no trace."""
        choices = [choice for choice in answer.choices if choice.opened_at]
        if not choices:
            return
        offset_s = wall_s - now
        slowest = max(choices, key=lambda choice: choice.last_at or now)
        context = self._propagator.extract(answer.trace_headers)
        parent = get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        attributes = _attributes(answer, choices, slowest, now)
        attributes |= {"meshlm.process": self._process, "url.path": path, "http.response.status_code": status}
        sampled = self._sampler.should_sample(context, trace_id, NAME, SpanKind.SERVER, attributes)
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return
        own = SpanContext(trace_id, self._ids.generate_span_id(), False, SAMPLED, parent.trace_state)
        shown = choices[:MAX_SEQUENCES] if self._detailed else [slowest]
        for choice in shown:
            self._add_hops(own, choice, offset_s)
        failed = Status(StatusCode.ERROR, answer.error.message if answer.error is not None else "")
        span = ReadableSpan(
            NAME,
            own,
            parent if parent.is_valid else None,
            self._resource,
            attributes,
            [event for choice in shown for event in _events(choice, now, offset_s)],
            kind=SpanKind.SERVER,
            status=failed if status >= 500 else Status(),
            start_time=_ns(min(choice.opened_at for choice in choices) + offset_s),
            end_time=_ns(wall_s),
            instrumentation_scope=self._scope,
        )
        self._queue.on_end(span)

    def _add_hops(self, request: SpanContext, choice: Choice, offset_s: float) -> None:
        """The spans of one sequence. The tracer of the library takes twice as long to make them."""
        for hop in hops(choice):
            own = SpanContext(request.trace_id, self._ids.generate_span_id(), False, SAMPLED, request.trace_state)
            span = ReadableSpan(
                hop.name,
                own,
                request,
                self._resource,
                {"meshlm.sequence": choice.index, "meshlm.process": hop.process},
                start_time=_ns(hop.begin + offset_s),
                end_time=_ns(hop.end + offset_s),
                instrumentation_scope=self._scope,
            )
            self._queue.on_end(span)

    def close(self) -> None:
        """What waits has FLUSH_S to leave; the process does not wait longer for its collector."""
        last = threading.Thread(target=self._queue.force_flush, args=(int(FLUSH_S * 1e3),), daemon=True)
        last.start()
        last.join(FLUSH_S)
        self._exporter.shutdown()  # else its threads would wait for the collector, and ask it again


def _events(choice: Choice, now: float, offset_s: float) -> list[Event]:
    """What happened to one sequence: its first token, preemptions, and attempts after a death."""
    sequence: Attributes = {"meshlm.sequence": choice.index}
    found = [Event("retry", {**sequence, "reason": reason}, _ns(at + offset_s)) for at, reason in choice.retried]
    if choice.first_at:
        found.append(Event("first_token", sequence, _ns(choice.first_at + offset_s)))
    ended_at = choice.last_at or now
    for event in choice.finished.events if choice.finished is not None else ():
        attributes = {**sequence, "reason": event.reason} if event.reason else sequence
        found.append(Event(event.name, attributes, _ns(ended_at - event.ago_us / 1e6 + offset_s)))
    return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(answer: Response, choices: Sequence[Choice], slowest: Choice, now: float) -> Attributes:
    """By vLLM's names, which are those of the semantic conventions for GenAI where there are such."""
    parsed_request, first = answer.parsed_request, slowest.first
    found: Attributes = {
        "gen_ai.response.model": answer.model,
        "gen_ai.request.id": answer.request_id,
        "gen_ai.request.n": parsed_request.answer.num_returned,
        "gen_ai.request.temperature": parsed_request.mesh.sampling.temperature,
        "gen_ai.request.top_p": parsed_request.mesh.sampling.top_p,
        "gen_ai.usage.num_sequences": len(choices),
        "gen_ai.usage.prompt_tokens": max(choice.num_prompt_tokens for choice in choices),
        "gen_ai.usage.completion_tokens": sum(len(choice.token_ids) for choice in choices),
        "gen_ai.latency.e2e": now - min(choice.opened_at for choice in choices),
    }
    if parsed_request.mesh.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = parsed_request.mesh.max_tokens
    ends = [choice.finished.reason if choice.finished is not None else FinishReason.ABORT for choice in choices]
    found["gen_ai.response.finish_reasons"] = ",".join(dict.fromkeys(end.value for end in ends))
    if first is not None and slowest.first_at:
        prefill_s, decode_s = first.prefill_us / 1e6, slowest.last_at - slowest.first_at
        found |= {
            "gen_ai.latency.time_to_first_token": slowest.first_at - slowest.opened_at,
            "gen_ai.latency.time_in_queue": first.queued_us / 1e6,
            "gen_ai.latency.time_in_model_prefill": prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
            "meshlm.engine": slowest.engine,
            "meshlm.cached_tokens": max(0, first.num_cached_tokens),
        }
    return found
