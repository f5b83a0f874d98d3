"""Prometheus metrics with vLLM's names under the prefix `meshlm:`.

Import after runtime/process/metrics.py has set the multiprocess directory: any frontend then answers for all. Without that directory it
answers for itself. Observations are counted in plain lists and handed over in bulk, once a second and when an answer ends, because one
observation of the library costs more than sending a token, and an answer may have thousands of sequences.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from meshlm.frontend.observe.exposition import INCARNATION, exposition, scrape, scrape_as_vllm
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.counts import HOP
from meshlm.protocol.edges.control import MeshStats, RankStats
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime import buckets
from meshlm.runtime.process.counts import LONGEST_HOP_S

_REFUSALS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_CHOICES = (1, 2, 5, 10, 20)
_HERE, _CACHED = "local_compute", "local_cache_hit"

_ENGINE = ("model_name", "engine")
__all__ = ["Metrics", "exposition", "scrape", "scrape_as_vllm"]
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level
_ROLES = ("prefill", "decode")  # of ranks (--dp-roles)
# By name: the field of RankStats, and the text.
_RANK_GAUGES = {
    "num_requests_running": ("num_running", "Requests in the running batch."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for a place in the batch."),
    "kv_cache_usage_perc": ("kv_cache_usage", "KV cache in use; 1 is all of it."),
}
_RANK_COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": (
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache, but for what was loaded into it.",
    ),
    "num_preemptions": ("num_preemptions", "Preempted requests."),
    "request_hand_offs": ("num_hand_offs", "Requests that went on at a rank that decodes (--dp-roles)."),
    "device_busy_seconds": ("busy_ns", "Seconds that the device has computed."),
    "device_idle_seconds": ("idle_ns", "Seconds that it stood still although requests were running."),
}
# By name: the field of GraphCounts, what its keys are, and the text.
_GRAPH_COUNTERS = {
    "cudagraph_replays": ("replays", "kind", "Steps that were replayed from a CUDA graph."),
    "cudagraph_misses": ("misses", "reason", "Steps that were launched kernel by kernel."),
    "dbo_steps": ("halved", "kind", "Steps whose halves took turns (--enable-dbo)."),
    "dbo_steps_off": ("whole", "reason", "Steps whose halves did not take turns although --enable-dbo asks for it."),
}


class EngineMetrics:
    """The counts of one frontend for the requests of one engine (a data-parallel rank); "" stands for no rank yet."""

    def __init__(self, families: "Families", model: str, engine: str) -> None:
        def of(family: Histogram) -> _Bulk:
            bulk = _Bulk(family.labels(model, engine))
            self._bulks.append(bulk)
            return bulk

        self._bulks: list[_Bulk] = []
        self.ttft, self.itl = of(families.ttft), of(families.itl)
        self.e2e, self.tpot = of(families.e2e), of(families.tpot)
        self.prompt, self.generation = of(families.prompt), of(families.generation)
        self.max_tokens, self.computed = of(families.max_tokens), of(families.computed)
        self.n, self.longest = of(families.n), of(families.longest)
        self.prompt_tokens = families.prompt_tokens.labels(model, engine)
        self._sources = {name: families.sources.labels(model, engine, name) for name in (_HERE, _CACHED)}
        self._cached_tokens = families.cached_tokens.labels(model, engine)
        self.generation_tokens = families.generation_tokens.labels(model, engine)
        self._phases = tuple(of(family) for family in families.phases)
        self._success = {reason: families.success.labels(model, engine, reason.value) for reason in FinishReason}
        self._finished: dict[FinishReason, int] = {}

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def prefilled(self, num_tokens: int, num_cached: int) -> None:
        """So many prompt tokens were prefilled, of which some were found in the prefix cache."""
        self.prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)
        self._sources[_CACHED].inc(num_cached)
        self._sources[_HERE].inc(num_tokens - num_cached)

    def phases(self, first: First, decode_s: float) -> None:
        """Observes where the time of a sequence that got tokens went, in seconds."""
        prefill_s = first.prefill_us / 1e6
        seconds = (first.queued_us / 1e6, prefill_s, decode_s, prefill_s + decode_s)
        for histogram, value in zip(self._phases, seconds, strict=True):
            histogram.observe(value)

    def flush(self) -> None:
        for bulk in self._bulks:
            bulk.flush()
        for reason, count in self._finished.items():
            self._success[reason].inc(count)
        self._finished.clear()


class Families:
    """The metrics of requests, without their labels' values."""

    def __init__(self, max_model_len: int) -> None:
        tokens = buckets.of_tokens(max_model_len)

        def histogram(name: str, text: str, limits: tuple[float, ...]) -> Histogram:
            return Histogram(f"meshlm:{name}", text, _ENGINE, buckets=limits)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"meshlm:{name}", text, (*_ENGINE, *labels))

        self.ttft = histogram("time_to_first_token_seconds", "Time to first token.", buckets.TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Time between tokens.", buckets.ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "Whole request.", buckets.LONG)
        self.tpot = histogram("request_time_per_output_token_seconds", "Mean time per output token.", buckets.ITL)
        self.phases = tuple(
            histogram(f"request_{name}_time_seconds", text, buckets.LONG)
            for name, text in (
                ("queue", "From a request's arrival at its scheduler to its place in the batch."),
                ("prefill", "From its place in the batch to its first token."),
                ("decode", "From its first token to its last."),
                ("inference", "From its place in the batch to its last token."),
            )
        )
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.generation = histogram("request_generation_tokens", "Output tokens of a request.", tokens)
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of a request, or its room.", tokens)
        self.n = histogram("request_params_n", "n of a request.", _CHOICES)
        text = "Output tokens of a request's longest choice."
        self.longest = histogram("request_max_num_generation_tokens", text, tokens)
        self.success = counter("request_success", "Finished requests.", "finished_reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that were prefilled.")
        self.generation_tokens = counter("generation_tokens", "Output tokens.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens that were found in the prefix cache.")
        self.sources = counter("prompt_tokens_by_source", "Prompt tokens, by where their KV came from.", "source")
        text = "Prompt tokens of a request that were computed."
        self.computed = histogram("request_prefill_kv_computed_tokens", text, tokens)


_CACHE_SIZES = ("kv_cache_size_tokens", "kv_cache_max_concurrency")


def cache_config(config: MeshConfig) -> dict[str, str]:
    """Settings of the KV cache, by vLLM's names."""
    cache, resolved = config.cache, config.resolved
    window = resolved.spec.sliding_window if resolved is not None else 0
    same = (
        "block_size",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "mamba_cache_mode",
        "num_gpu_blocks_override",
    )
    settings = {name: getattr(cache, name) for name in same}
    settings |= {"cache_dtype": cache.kv_cache_dtype, "kv_cache_memory_bytes": cache.kv_cache_memory}
    settings["sliding_window"] = window or None
    return {name: str(value) for name, value in settings.items()}


class Metrics:
    """One frontend's part. `model` is the label model_name; `engines` have their series from the start."""

    def __init__(
        self, model: str, max_model_len: int, engines: Iterable[int] = (0,), cache: Mapping[str, str] | None = None
    ) -> None:
        self._model = model
        self._families = Families(max_model_len)
        self._by_engine: dict[str, EngineMetrics] = {}
        self._unplaced = ""  # the engine of a request that no rank has begun
        for number in engines:
            self.engine(str(number))
        if len(self._by_engine) == 1:
            (self._unplaced,) = self._by_engine
        text = "From a request's head to its 503, of those refused by their head."
        refusals = Histogram("meshlm:request_refusal_seconds", text, ("model_name",), buckets=_REFUSALS)
        self.refusal = refusals.labels(model)
        text = "Requests that got an error at once, by reason."
        self._refusals = Counter("meshlm:request_refusals", text, ("model_name", "reason"))
        text = "From a step's text leaving the detokenizer to the last of it on the clients' sockets."
        writes = Histogram("meshlm:step_write_time_seconds", text, ("model_name",), buckets=HOP)
        self._write = _Bulk(writes.labels(model))
        self._gauges = {field: _shared(name, text, *_ENGINE) for name, (field, text) in _RANK_GAUGES.items()}
        self._counters = {
            field: _shared(f"{name}_total", text, *_ENGINE, INCARNATION)
            for name, (field, text) in _RANK_COUNTERS.items()
        }
        self._graphs = {
            field: _shared(f"{name}_total", text, *_ENGINE, INCARNATION, key)
            for name, (field, key, text) in _GRAPH_COUNTERS.items()
        }
        asleep = "1 for the state that it is in: awake, weights_offloaded (level 1) or discard_all (level 2)."
        self._sleep = _shared("engine_sleep_state", asleep, *_ENGINE, "sleep_state")
        version = (
            "The number of the version of its weights: 0 at the start, higher with each update; -1: none of the mesh's."
        )
        self._weights = _shared("weights_version", version, *_ENGINE)
        self._roles = _shared("rank_role", "1 for the rank's role: prefill or decode (--dp-roles).", *_ENGINE, "role")
        held = "Requests that wait for a scheduler that serves."
        self._held = _shared("num_requests_held", held, "model_name").labels(model)
        self._known: set[str] = set()
        self._has_role: set[str] = set()
        self._cache = cache
        self._info: Gauge | None = None
        self._cache_sizes: dict[tuple[str, str], tuple[str, str]] = {}  # of each engine, as it was told last
        if cache is not None:
            text = "The KV cache: settings, tokens held, requests of the full context held. 1; 0 of what is no more."
            self._info = _shared("cache_config_info", text, *_ENGINE, *cache, *_CACHE_SIZES)

    def _tell_cache(self, rank: RankStats) -> None:
        """The settings and sizes of a rank's KV cache, which are others after its workers were started anew."""
        if self._info is None or self._cache is None or not rank.kv_cache_requests:
            return
        engine = (self._model, str(rank.dp_rank))
        sizes = (str(rank.kv_cache_tokens), f"{rank.kv_cache_requests:.2f}")
        if (before := self._cache_sizes.get(engine, sizes)) != sizes:
            self._info.labels(*engine, *self._cache.values(), *before).set(0)
        self._cache_sizes[engine] = sizes
        self._info.labels(*engine, *self._cache.values(), *sizes).set(1)

    def engine(self, engine: str) -> EngineMetrics:
        engine = engine or self._unplaced
        if (found := self._by_engine.get(engine)) is None:
            found = self._by_engine[engine] = EngineMetrics(self._families, self._model, engine)
        return found

    def refused(self, reason: str) -> None:
        """A request got an error; "" where that is none of its own, but this server's."""
        if reason:
            self._refusals.labels(self._model, reason).inc()

    def written(self, left_ns: int, now_ns: int) -> None:
        """The text of a step, which left its detokenizer then, is on the clients' sockets."""
        if left_ns and 0 <= now_ns - left_ns < LONGEST_HOP_S * 1e9:
            self._write.observe((now_ns - left_ns) / 1e9)

    def flush(self) -> None:
        self._write.flush()
        for engine in self._by_engine.values():
            engine.flush()

    def mesh(self, stats: MeshStats) -> None:
        """The schedulers' figures, as the coordinator collected them, and its own."""
        self._held.set(stats.num_held)
        engines = {str(rank.dp_rank) for rank in stats.ranks}
        for gone in self._known - engines:  # its last figures stay in the shared files, so they must be right
            for gauge in self._gauges.values():
                gauge.labels(self._model, gone).set(0)
            self._weights.labels(self._model, gone).set(0)
            for state in _SLEEP_STATES:
                self._sleep.labels(self._model, gone, state).set(0)
            for role in _ROLES if gone in self._has_role else ():
                self._roles.labels(self._model, gone, role).set(0)
        self._known = engines
        for rank in stats.ranks:
            engine = (self._model, str(rank.dp_rank))
            self._tell_cache(rank)
            self._weights.labels(*engine).set(0 if rank.weights is None else rank.weights.number)
            for level, state in enumerate(_SLEEP_STATES):
                self._sleep.labels(*engine, state).set(rank.sleeping.level == level)
            if rank.role:
                self._has_role.add(engine[1])
            for role in _ROLES if rank.role else ():
                self._roles.labels(*engine, role).set(rank.role == role)
            for field, gauge in self._gauges.items():
                gauge.labels(*engine).set(getattr(rank, field))
            for field, counter in self._counters.items():
                value = getattr(rank, field)
                counter.labels(*engine, str(rank.incarnation)).set(value / 1e9 if field.endswith("_ns") else value)
            for field, counter in self._graphs.items():
                for label, count in getattr(rank.graphs, field).items():
                    counter.labels(*engine, str(rank.graphs.incarnation), label).set(count)


def _shared(name: str, text: str, *labels: str) -> Gauge:
    """A gauge whose value all frontends are told, so that the newest one holds."""
    return Gauge(f"meshlm:{name}", text, labels, multiprocess_mode="mostrecent")


class _Bulk:
    """Observations of a histogram, counted here and handed over in bulk."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds: Sequence[float] = histogram._upper_bounds  # infinity is the last
        self._counts: dict[int, int] = {}  # by bucket
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] = self._counts.get(bucket, 0) + times
        self._sum += value * times

    def flush(self) -> None:
        """prometheus_client has no call for many observations at once; these are its own fields."""
        if not self._counts:
            return
        self._histogram._sum.inc(self._sum)
        for bucket, count in self._counts.items():
            self._histogram._buckets[bucket].inc(count)
        self._counts = {}
        self._sum = 0.0
