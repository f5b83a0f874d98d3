"""`LLM.get_metrics`: figures of the ranks and of the sequences that have ended, in the classes of vLLM's Python API.

An `LLM` has no frontend. What sequences took is counted here as the client hears of it; the ranks' own figures come with the mesh's.
Names are those of /metrics, without the `_total` that Prometheus wants behind counters; of what /metrics has besides (times between
tokens, steps, processes) nothing is here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from meshlm.protocol.edges.control import MeshStats, RankStats
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime import buckets
from meshlm.runtime.client.draft_metrics import DraftsTold

_SEQUENCES = {  # names of histograms, by what is observed
    "ttft": "time_to_first_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
    "prompt": "request_prompt_tokens",
    "generation": "request_generation_tokens",
}
_GAUGES: dict[str, Callable[[RankStats], float]] = {
    "num_requests_running": lambda rank: rank.num_running,
    "num_requests_waiting": lambda rank: rank.num_waiting,
    "kv_cache_usage_perc": lambda rank: rank.kv_cache_usage,
}
_DRAFTS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")  # of a rank, since its scheduler began


@dataclass
class Metric:
    """One series. labels: `model_name`, `engine` (a data-parallel rank), and of some another."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Vector(Metric):
    """Counters, one for each place."""

    values: list[int]


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Histogram(Metric):
    """Observations. buckets: how many were at most so large, by the limit as Prometheus writes it; `+Inf` has them all."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Observed:
    def __init__(self, limits: tuple[float, ...]) -> None:
        self._limits = limits
        self._counts = [0] * (len(limits) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._limits, value)] += 1
        self._sum += value

    def as_metric(self, name: str, labels: dict[str, str]) -> Histogram:
        found, below = {}, 0
        for limit, count in zip((*map(float, self._limits), float("inf")), self._counts, strict=True):
            below += count
            found["+Inf" if limit == float("inf") else str(limit)] = below
        return Histogram(name, labels, below, self._sum, found)


class OfEngine:
    """The counts of the sequences that one rank has begun."""

    def __init__(self, max_model_len: int) -> None:
        tokens = buckets.of_tokens(max_model_len)
        limits = {"ttft": buckets.TTFT, "tpot": buckets.ITL, "prompt": tokens, "generation": tokens}
        self.observed = {what: _Observed(limits.get(what, buckets.LONG)) for what in _SEQUENCES}
        self.counts = {"prompt_tokens": 0, "prompt_tokens_cached": 0, "generation_tokens": 0}
        self.finished = dict.fromkeys(FinishReason, 0)


class Counts:
    """All that the client counts. Owned by client.py."""

    def __init__(self) -> None:
        self.max_model_len = 1
        self.drafts_told: DraftsTold | None = None
        self._engines: dict[str, OfEngine] = {}
        # A rank's counter and the value of its label, by its scheduler's incarnation.
        self._ranks: dict[tuple[int, str, str], dict[int, int]] = {}

    def engine(self, number: str) -> OfEngine:
        """Of this rank; "": of none yet."""
        if number not in self._engines:
            self._engines[number] = OfEngine(self.max_model_len)
        return self._engines[number]

    def begun(self, first: First, ttft_s: float, prompt_tokens: int) -> str:
        """The first token of a sequence has come: the rank that has computed it."""
        number = str(first.dp_rank)
        engine = self.engine(number)
        for what, value in (("ttft", ttft_s), ("queue", first.queued_us / 1e6), ("prefill", first.prefill_us / 1e6)):
            engine.observed[what].add(value)
        engine.counts["prompt_tokens"] += prompt_tokens
        engine.counts["prompt_tokens_cached"] += max(0, first.num_cached_tokens)
        return number

    def ended(self, engine: str, reason: FinishReason, sizes: tuple[int, int], times_s: tuple[float, float]) -> None:
        """A sequence is over. sizes: of its prompt, of its answer; times_s: of all of it, and from its first token to its last."""
        found, (prompt, generation), (whole_s, decode_s) = self.engine(engine), sizes, times_s
        found.finished[reason] += 1
        found.counts["generation_tokens"] += generation
        if not generation:
            return
        for what, value in (("e2e", whole_s), ("decode", decode_s), ("prompt", prompt), ("generation", generation)):
            found.observed[what].add(value)
        if generation > 1:
            found.observed["tpot"].add(decode_s / (generation - 1))

    def given_up(self, engine: str) -> None:
        """Nobody waits for a sequence any more: as at /metrics it is counted and has no latency."""
        self.engine(engine).finished[FinishReason.ABORT] += 1

    def take(self, stats: MeshStats) -> None:
        """The mesh's figures came: a scheduler that dies before the next ones has counted these."""
        for rank in stats.ranks:
            self.engine(str(rank.dp_rank))
            found = {(name, ""): getattr(rank, name) for name in _COUNTERS}
            for name in (*_DRAFTS, _PER_POSITION):
                found |= {(name, label): int(count) for label, count in rank.counts.counters.get(name, {}).items()}
            for counter, count in found.items():
                self._ranks.setdefault((rank.dp_rank, *counter), {})[rank.incarnation] = count

    def snapshot(self, stats: MeshStats, model: str) -> list[Metric]:
        """All metrics. stats: the mesh's figures of this moment, which were taken."""
        return [*self._of_ranks(stats.ranks, model), *self._of_sequences(model)]

    def _of_ranks(self, ranks: Iterable[RankStats], model: str) -> Iterator[Metric]:
        for rank in ranks:
            labels = {"model_name": model, "engine": str(rank.dp_rank)}
            for name, value in _GAUGES.items():
                yield Gauge(f"meshlm:{name}", labels, float(value(rank)))
            mine = {key[1:]: sum(counts.values()) for key, counts in self._ranks.items() if key[0] == rank.dp_rank}
            for name in (*_COUNTERS, *_DRAFTS):
                if (name, "") in mine:
                    yield Counter(f"meshlm:{name}", labels, mine[name, ""])
            places = [int(label) for name, label in mine if name == _PER_POSITION]
            if places:
                values = [mine.get((_PER_POSITION, str(place)), 0) for place in range(max(places) + 1)]
                yield Vector(f"meshlm:{_PER_POSITION}", labels, values)

    def _of_sequences(self, model: str) -> Iterator[Metric]:
        for number, engine in sorted(self._engines.items()):
            labels = {"model_name": model, "engine": number}
            for name, count in engine.counts.items():
                yield Counter(f"meshlm:{name}", labels, count)
            for reason, count in engine.finished.items():
                yield Counter("meshlm:request_success", {**labels, "finished_reason": reason.value}, count)
            for what, name in _SEQUENCES.items():
                yield engine.observed[what].as_metric(f"meshlm:{name}", labels)
