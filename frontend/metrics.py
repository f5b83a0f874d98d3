"""Prometheus metrics with vLLM's names under the prefix `meshlm:`.

Import after runtime/metrics.py has set the multiprocess directory: any frontend then answers for all. Without that directory it
answers for itself. Per-token observations are counted in plain lists and handed over once a second, because one observation of the
library costs more than sending the token.
"""

import os
from bisect import bisect_left

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.metrics import MetricWrapperBase

from meshlm.protocol.control_edge import MeshStats
from meshlm.protocol.token_edge import First

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REFUSALS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)
_CHOICES = (1, 2, 5, 10, 20)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """One frontend's part. `model` is the label model_name."""

    def __init__(self, model: str) -> None:
        labels = ("model_name",)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"meshlm:{name}", text, labels, buckets=buckets)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"meshlm:{name}", text, labels)

        self.ttft = histogram("time_to_first_token_seconds", "Time to first token.", _SECONDS).labels(model)
        self.itl = _Bulk(histogram("inter_token_latency_seconds", "Time between tokens.", _ITL).labels(model), _ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "Whole request.", _LONG).labels(model)
        self.refusal = histogram(
            "request_refusal_seconds", "From a request's head to its 503, of those refused by their head.", _REFUSALS
        ).labels(model)
        self.tpot = histogram("request_time_per_output_token_seconds", "Mean time per output token.", _ITL).labels(
            model
        )
        self._queue, self._prefill, self._decode, self._inference = (
            histogram(f"request_{name}_time_seconds", text, _LONG).labels(model)
            for name, text in (
                ("queue", "From a request's arrival at its scheduler to its place in the batch."),
                ("prefill", "From its place in the batch to its first token."),
                ("decode", "From its first token to its last."),
                ("inference", "From its place in the batch to its last token."),
            )
        )
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS).labels(model)
        self.generation = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS).labels(model)
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS).labels(model)
        self.n = histogram("request_params_n", "n of a request.", _CHOICES).labels(model)
        self.longest = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", _TOKENS
        ).labels(model)
        self._success = Counter("meshlm:request_success", "Finished requests.", ("model_name", "finished_reason"))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.").labels(model)
        self.generation_tokens = counter("generation_tokens", "Output tokens.").labels(model)
        self._gauges = {
            name: Gauge(f"meshlm:{name}", text, ("model_name", "engine"), multiprocess_mode="mostrecent")
            for name, text in (
                ("num_requests_running", "Requests in the running batch."),
                ("num_requests_waiting", "Requests that wait for a place in the batch."),
                ("kv_cache_usage_perc", "KV cache in use; 1 is all of it."),
                ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
                ("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
                ("num_preemptions_total", "Preempted requests."),
                ("device_busy_seconds_total", "Seconds that the device has computed."),
                (
                    "device_idle_seconds_total",
                    "Seconds that it stood still although requests were running.",
                ),
            )
        }
        self._graphs = {
            name: Gauge(f"meshlm:{name}", text, ("model_name", "engine", label), multiprocess_mode="mostrecent")
            for name, text, label in (
                ("cudagraph_replays_total", "Steps that were replayed from a CUDA graph.", "kind"),
                ("cudagraph_misses_total", "Steps that were launched kernel by kernel.", "reason"),
            )
        }
        self._held = Gauge(
            "meshlm:num_requests_held",
            "Requests that wait for a scheduler that serves.",
            ("model_name",),
            multiprocess_mode="mostrecent",
        ).labels(model)
        self._model = model
        self._engines: set[str] = set()

    def finished(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def phases(self, first: First | None, decode_s: float) -> None:
        """Of a sequence that got tokens: where its time went."""
        if first is not None:
            self._queue.observe(first.queued_us / 1e6)
            self._prefill.observe(first.prefill_us / 1e6)
            self._decode.observe(decode_s)
            self._inference.observe(first.prefill_us / 1e6 + decode_s)

    def mesh(self, stats: MeshStats) -> None:
        """The schedulers' figures, as the coordinator collected them, and its own."""
        self._held.set(stats.num_held)
        engines = {str(rank.dp_rank) for rank in stats.ranks}
        for gone in self._engines - engines:  # its last figures stay in the shared files, so they must be right
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                self._gauges[name].labels(self._model, gone).set(0)
        self._engines = engines
        for rank in stats.ranks:
            values = (
                rank.num_running,
                rank.num_waiting,
                rank.kv_cache_usage,
                rank.prefix_cache_queries,
                rank.prefix_cache_hits,
                rank.num_preemptions,
                rank.busy_ns / 1e9,
                rank.idle_ns / 1e9,
            )
            for gauge, value in zip(self._gauges.values(), values, strict=True):
                gauge.labels(self._model, str(rank.dp_rank)).set(value)
            for gauge, counts in zip(self._graphs.values(), (rank.graphs.replays, rank.graphs.misses), strict=True):
                for label, count in counts.items():
                    gauge.labels(self._model, str(rank.dp_rank), label).set(count)

    def flush(self, intervals: dict[float, int]) -> None:
        """Take the seconds between tokens since the last flush; empties the dictionary."""
        for interval, times in intervals.items():
            self.itl.observe(interval, times)
        intervals.clear()
        self.itl.flush()


class _Bulk:
    """Observations of a histogram, counted here and handed over in bulk."""

    def __init__(self, histogram: MetricWrapperBase, buckets: tuple[float, ...]) -> None:
        self._histogram, self._bounds = histogram, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def flush(self) -> None:
        """prometheus_client has no call for many observations at once; these are its own fields."""
        if not self._sum:
            return
        self._histogram._sum.inc(self._sum)  # type: ignore[attr-defined]
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):  # type: ignore[attr-defined]
            if count:
                bucket.inc(count)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


def exposition() -> bytes:
    """All frontends' metrics in Prometheus' text format, or this one's."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest()
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)
