"""Makes the dashboard's events of what the frontend has been told. Pure; owned by feed.py."""

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from meshlm.frontend.dashboard import requests, tiers
from meshlm.frontend.dashboard.requests import OtherFrontends
from meshlm.protocol.dashboard import EdgeView, NewsView, Percentiles, ProcessView, RankView, RequestView
from meshlm.protocol.edges.control import MeshProcesses, MeshStats, News, ProcessReport, RankStats, StandbyReport
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.client.placement import Choice

FIGURES_S, RUNNING_S = 0.5, 1.0  # figures and the requests that run are made anew so often
NEWS_S = 6.0  # of an event: longer than the longest time between two
STEP_HOPS = ("schedule", "send", "launch", "device", "return")  # as in step_..._time_seconds of docs/metrics.md
DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")  # likewise spec_decode_...

WINDOW_S = 60  # of percentiles
BUCKETS_PER_E = 25  # so a percentile is right to 2 percent
SPAN_S = 2.0  # that rates cover
STILL_S = 1.6  # when a count that stands still shows in them: some are told once a second

Key = TypeVar("Key", bound=Hashable)
Count = tuple[int, int, str]  # a rank, its incarnation, and what it counts
_encode = msgspec.json.Encoder().encode


class Facts(Struct, frozen=True):
    """What stays the same while the frontend lives."""

    frontend: str
    version: str
    model: str


class Known(Struct, frozen=True):
    """What was told last."""

    stats: MeshStats
    mesh: MeshProcesses
    news: Iterable[News]
    choices: Iterable[Choice]  # that run, the oldest first
    others: OtherFrontends
    num_open: int
    num_watchers: int
    num_ended: int
    ended: tuple[RequestView, ...]  # since the snapshot before


class Times:
    """Durations of the last WINDOW_S seconds, in logarithmic buckets."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, dict[int, int]]] = deque()  # a second, and its counts by bucket
        self._sums: dict[int, int] = {}  # of all of them

    def observe(self, seconds: float, now: float, times: int = 1) -> None:
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append((second, {}))
            self._expire(now)
        counts = self._slots[-1][1]
        bucket = math.floor(math.log(max(seconds, 1e-6)) * BUCKETS_PER_E)
        counts[bucket] = counts.get(bucket, 0) + times
        self._sums[bucket] = self._sums.get(bucket, 0) + times

    def buckets(self, now: float) -> dict[int, int]:
        """How many durations there were, by the logarithm of their length."""
        self._expire(now)
        return dict(self._sums)

    def _expire(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - WINDOW_S:
            for bucket, count in self._slots.popleft()[1].items():
                if left := self._sums[bucket] - count:
                    self._sums[bucket] = left
                else:
                    del self._sums[bucket]


def percentiles(*times: Mapping[int, int]) -> Percentiles:
    """Of durations that were observed in several places, each by bucket."""
    sums: dict[int, int] = {}
    for buckets in times:
        for bucket, count in buckets.items():
            sums[bucket] = sums.get(bucket, 0) + count
    total, ordered = sum(sums.values()), sorted(sums.items())
    return Percentiles(total, *(_at(ordered, total * share) for share in (0.5, 0.9, 0.99)))


def _at(buckets: list[tuple[int, int]], wanted: float) -> float:
    seen = 0
    for bucket, count in buckets:
        seen += count
        if seen >= wanted:
            return round(math.exp((bucket + 0.5) / BUCKETS_PER_E), 7)
    return 0.0


class Rates:
    """How fast counts grow that are looked at again and again. A count that falls began anew."""

    def __init__(self) -> None:
        self._points: dict[Hashable, deque[tuple[float, float]]] = {}  # when the count was seen to change

    def of(self, totals: Mapping[Key, float], now: float) -> dict[Key, float]:
        """The growth of each count a second. Counts that are absent are forgotten."""
        self._points = {key: self._points.get(key) or deque() for key in totals}
        return {key: _rate(self._points[key], total, now) for key, total in totals.items()}


def _rate(points: deque[tuple[float, float]], total: float, now: float) -> float:
    if points and total < points[-1][1]:
        points.clear()
    if not points or total != points[-1][1] or now - points[-1][0] >= STILL_S:
        points.append((now, total))
    while len(points) > 2 and points[1][0] <= now - SPAN_S:
        points.popleft()
    (begun, first), (ended, last) = points[0], points[-1]
    return (last - first) / (ended - begun) if ended > begun else 0.0


class Snapshots:
    """Makes them as JSON (protocol/dashboard.py: Snapshot): parts that are as they were are not encoded again. Keeps what rates need.
    `now` is of the loop's clock, `wall_s` of the wall's."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.ttft, self.itl = Times(), Times()
        self._number = 0
        self._mesh: tuple[MeshProcesses | None, bytes] = (None, b"")
        self._figures, self._figures_at = b"", -FIGURES_S
        self._running, self._running_at = b"", -RUNNING_S
        self._edge_rates, self._rates = Rates(), Rates()

    def make(self, known: Known, now: float, wall_s: float) -> bytes:
        self._number += 1
        if known.mesh is not self._mesh[0]:
            self._mesh = known.mesh, _mesh(known.mesh, wall_s)
        if now >= self._figures_at:
            self._figures_at, self._figures = now + FIGURES_S, self._make_figures(known, now)
        if now >= self._running_at:
            running = known.others.with_running(requests.running(known.choices, now), now)
            self._running_at, self._running = now + RUNNING_S, _fields(running=running)
        return b"{" + b",".join((self._moving(known, wall_s), self._mesh[1], self._figures, self._running)) + b"}"

    def _moving(self, known: Known, wall_s: float) -> bytes:
        """The part of a snapshot that is made anew each time."""
        stats = known.stats
        return _fields(
            number=self._number,
            at_s=round(wall_s, 3),
            **msgspec.structs.asdict(self._facts),
            serving=stats.serving,
            reason=stats.reason,
            paused=stats.paused,
            blocked=stats.blocked,
            num_held=stats.num_held,
            num_watchers=known.num_watchers,
            num_ended=known.num_ended,
            ended=known.ended,
            news=[news_view(one) for one in known.news if one.at_s > wall_s - NEWS_S],
        )

    def _make_figures(self, known: Known, now: float) -> bytes:
        ranks, others = self._ranks(known.stats.ranks, now), known.others.heard(now)
        return _fields(
            prompt_per_s=round(sum(rank.prompt_per_s for rank in ranks), 1),
            generated_per_s=round(sum(rank.generated_per_s for rank in ranks), 1),
            ttft=percentiles(self.ttft.buckets(now), *(one.ttft for one in others)),
            itl=percentiles(self.itl.buckets(now), *(one.itl for one in others)),
            edges=self._edges(known.mesh.processes, now),
            ranks=ranks,
            stores=tiers.stores(known.stats.counts),
            num_open=known.num_open + sum(one.num_open for one in others),
        )

    def _edges(self, processes: Iterable[ProcessReport], now: float) -> tuple[EdgeView, ...]:
        """The links that requests and tokens take; what the supervisor hears and says is the same all the time."""
        totals = {
            (str(one.identity), peer): sent
            for one in processes
            if one.identity.role is not Role.SUPERVISOR
            for peer, sent in one.sent.items()
            if not peer.startswith(Role.SUPERVISOR.value)
        }
        rates = self._edge_rates.of(totals, now)
        return tuple(EdgeView(source, target, round(rate, 1)) for (source, target), rate in rates.items())

    def _ranks(self, ranks: Iterable[RankStats], now: float) -> list[RankView]:
        ranks = sorted(ranks, key=lambda rank: rank.dp_rank)
        rates = self._rates.of(dict(chain.from_iterable(map(_totals, ranks))), now)
        return [_rank_view(rank, rates) for rank in ranks]


def _rank_view(rank: RankStats, rates: dict[Count, float]) -> RankView:
    of = rank.dp_rank, rank.incarnation
    busy, idle = rates[(*of, "busy")], rates[(*of, "idle")]
    length = _ratio(rates, of, "num_accepted_tokens", "num_drafts")
    times = {hop: rates.get((*of, f"times {hop}"), 0.0) for hop in STEP_HOPS}
    return RankView(
        rank=rank.dp_rank,
        running=rank.num_running,
        waiting=rank.num_waiting,
        waiting_for=_gauge(rank, "num_requests_waiting_by_reason"),
        kv_pages=_gauge(rank, "kv_cache_blocks"),
        kv_groups=_gauge(rank, "kv_cache_group_blocks"),
        step={hop: round(rates[(*of, f"seconds {hop}")] / times[hop], 7) for hop in STEP_HOPS if times[hop]},
        expert_loads=rank.graphs.expert_loads,
        accepted=_ratio(rates, of, "num_accepted_tokens", "num_draft_tokens"),
        accepted_len=None if length is None else round(1 + length, 3),
        kv_usage=round(rank.kv_cache_usage, 4),
        hit_rate=round(rank.prefix_cache_hits / max(1, rank.prefix_cache_queries), 4),
        preemptions=rank.num_preemptions,
        prompt_per_s=round(rates[(*of, "prompt")], 1),
        generated_per_s=round(rates[(*of, "generated")], 1),
        busy=round(busy / (busy + idle), 3) if busy + idle else 0.0,
        role=rank.role,
        hand_offs=rank.num_hand_offs,
    )


def _ratio(rates: dict[Count, float], of: tuple[int, int], what: str, to: str) -> float | None:
    """How much one count of drafts grew for each of another's; None where that one did not."""
    whole = rates.get((*of, to), 0.0)
    return round(rates[(*of, what)] / whole, 3) if whole else None


def _totals(rank: RankStats) -> Iterable[tuple[Count, float]]:
    """What a rank has counted; of each hop of a step how often it was passed, and the seconds that it took in all."""
    of = rank.dp_rank, rank.incarnation
    yield (*of, "prompt"), rank.prompt_tokens
    yield (*of, "generated"), rank.generation_tokens
    yield (*of, "busy"), rank.busy_ns
    yield (*of, "idle"), rank.idle_ns
    for name in DRAFTS:
        yield (*of, name), sum(rank.counts.counters.get(f"spec_decode_{name}", {}).values())
    for hop in STEP_HOPS:
        if (seen := rank.counts.histograms.get(f"step_{hop}_time_seconds")) is not None:
            yield (*of, f"times {hop}"), sum(seen.counts)
            yield (*of, f"seconds {hop}"), seen.total


def _fields(**fields: Any) -> bytes:
    """Fields of a snapshot, as JSON without the brackets."""
    return _encode(fields)[1:-1]


def _mesh(mesh: MeshProcesses, wall_s: float) -> bytes:
    """The part of a snapshot that the supervisor has told."""
    processes = [_process(one, wall_s) for one in mesh.processes]
    return _fields(missing=mesh.missing, processes=processes, standbys=[_standby(one, wall_s) for one in mesh.standbys])


def _gauge(rank: RankStats, name: str) -> dict[str, int]:
    return {label: int(value) for label, value in rank.counts.gauges.get(name, {}).items()}


def _process(report: ProcessReport, wall_s: float) -> ProcessView:
    return ProcessView(
        name=str(report.identity),
        node=report.host,
        state=report.state,
        pid=report.pid,
        uptime_s=round(wall_s - report.started_s, 1) if report.pid else 0.0,
        restarts=report.restarts,
        phase=report.phase,
        rss_bytes=report.rss_bytes,
    )


def _standby(report: StandbyReport, wall_s: float) -> ProcessView:
    uptime_s = round(wall_s - report.started_s, 1)
    return ProcessView(report.role.value, "", report.state, report.pid, uptime_s, 0, "", report.rss_bytes)


def news_view(news: News) -> NewsView:
    return NewsView(round(news.at_s, 3), news.level, news.text)
