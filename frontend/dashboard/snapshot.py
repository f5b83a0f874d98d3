"""Makes the dashboard's events of what the frontend has been told. Pure; owned by feed.py."""

from collections.abc import Iterable
from itertools import chain

import msgspec
from msgspec import Struct

from meshlm.frontend.dashboard import requests
from meshlm.frontend.dashboard.others import OtherFrontends
from meshlm.frontend.dashboard.recent import Rates, Times, percentiles
from meshlm.protocol.dashboard import EdgeView, NewsView, Percentiles, ProcessView, RankView, RequestView
from meshlm.protocol.edges.control import MeshProcesses, MeshStats, News, ProcessReport, RankStats, StandbyReport
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.client.choice import Choice

FIGURES_S, RUNNING_S = 0.5, 1.0  # figures and the requests that run are made anew so often
NEWS_S = 6.0  # of an event: longer than the longest time between two
STEP_HOPS = ("schedule", "send", "launch", "device", "return")  # as in step_..._time_seconds of docs/metrics.md

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


class _Moving(Struct, frozen=True):
    """The part of a snapshot that is made anew each time."""

    number: int
    at_s: float
    frontend: str
    version: str
    model: str
    serving: bool
    reason: str
    paused: bool
    blocked: str
    num_held: int
    num_watchers: int
    num_ended: int
    ended: tuple[RequestView, ...]
    news: tuple[NewsView, ...]


class _Mesh(Struct, frozen=True):
    """... when the supervisor has told it."""

    missing: str
    processes: tuple[ProcessView, ...]
    standbys: tuple[ProcessView, ...]


class _Figures(Struct, frozen=True):
    """... each FIGURES_S."""

    prompt_per_s: float
    generated_per_s: float
    ttft: Percentiles
    itl: Percentiles
    edges: tuple[EdgeView, ...]
    ranks: tuple[RankView, ...]
    num_open: int


class _Running(Struct, frozen=True):
    """... each RUNNING_S: it costs most."""

    running: tuple[RequestView, ...]


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
        self._edge_rates, self._token_rates, self._busy_rates, self._step_rates = Rates(), Rates(), Rates(), Rates()

    def make(self, known: Known, now: float, wall_s: float) -> bytes:
        self._number += 1
        if known.mesh is not self._mesh[0]:
            self._mesh = known.mesh, _inside(_mesh(known.mesh, wall_s))
        if now >= self._figures_at:
            self._figures_at, self._figures = now + FIGURES_S, _inside(self._make_figures(known, now))
        if now >= self._running_at:
            running = known.others.with_running(requests.running(known.choices, now), now)
            self._running_at, self._running = now + RUNNING_S, _inside(_Running(running))
        moving = _inside(self._make_moving(known, wall_s))
        return b"{" + b",".join((moving, self._mesh[1], self._figures, self._running)) + b"}"

    def _make_moving(self, known: Known, wall_s: float) -> _Moving:
        stats = known.stats
        return _Moving(
            number=self._number,
            at_s=round(wall_s, 3),
            frontend=self._facts.frontend,
            version=self._facts.version,
            model=self._facts.model,
            serving=stats.serving,
            reason=stats.reason,
            paused=stats.paused,
            blocked=stats.blocked,
            num_held=stats.num_held,
            num_watchers=known.num_watchers,
            num_ended=known.num_ended,
            ended=known.ended,
            news=tuple(news_view(one) for one in known.news if one.at_s > wall_s - NEWS_S),
        )

    def _make_figures(self, known: Known, now: float) -> _Figures:
        ranks, others = self._ranks(known.stats.ranks, now), known.others.heard(now)
        return _Figures(
            prompt_per_s=round(sum(rank.prompt_per_s for rank in ranks), 1),
            generated_per_s=round(sum(rank.generated_per_s for rank in ranks), 1),
            ttft=percentiles(self.ttft.buckets(now), *(one.ttft for one in others)),
            itl=percentiles(self.itl.buckets(now), *(one.itl for one in others)),
            edges=self._edges(known.mesh.processes, now),
            ranks=ranks,
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

    def _ranks(self, ranks: Iterable[RankStats], now: float) -> tuple[RankView, ...]:
        ranks = sorted(ranks, key=lambda rank: rank.dp_rank)
        steps = self._step_rates.of(dict(chain.from_iterable(map(_step_totals, ranks))), now)
        tokens: dict[tuple[int, int, str], float] = {}
        for rank in ranks:
            of = rank.dp_rank, rank.incarnation
            tokens |= {(*of, "prompt"): rank.prompt_tokens, (*of, "generated"): rank.generation_tokens}
        rates = self._token_rates.of(tokens, now)
        times: dict[tuple[int, int, str], float] = {}
        for rank in ranks:
            of = rank.dp_rank, rank.incarnation
            times |= {(*of, "busy"): rank.busy_ns, (*of, "idle"): rank.idle_ns}
        shares = self._busy_rates.of(times, now)
        found = []
        for rank in ranks:
            of = rank.dp_rank, rank.incarnation
            busy, idle = shares[(*of, "busy")], shares[(*of, "idle")]
            found.append(
                RankView(
                    rank=rank.dp_rank,
                    running=rank.num_running,
                    waiting=rank.num_waiting,
                    waiting_for=_gauge(rank, "num_requests_waiting_by_reason"),
                    kv_pages=_gauge(rank, "kv_cache_blocks"),
                    kv_groups=_gauge(rank, "kv_cache_group_blocks"),
                    step=_means(steps, rank),
                    expert_loads=rank.graphs.expert_loads,
                    kv_usage=round(rank.kv_cache_usage, 4),
                    hit_rate=round(rank.prefix_cache_hits / max(1, rank.prefix_cache_queries), 4),
                    preemptions=rank.num_preemptions,
                    prompt_per_s=round(rates[(*of, "prompt")], 1),
                    generated_per_s=round(rates[(*of, "generated")], 1),
                    busy=round(busy / (busy + idle), 3) if busy + idle else 0.0,
                )
            )
        return tuple(found)


def _inside(part: Struct) -> bytes:
    """The fields of a part, as JSON without the brackets."""
    return _encode(part)[1:-1]


def _mesh(mesh: MeshProcesses, wall_s: float) -> _Mesh:
    return _Mesh(
        mesh.missing,
        tuple(_process(one, wall_s) for one in mesh.processes),
        tuple(_standby(one, wall_s) for one in mesh.standbys),
    )


def _gauge(rank: RankStats, name: str) -> dict[str, int]:
    return {label: int(value) for label, value in rank.counts.gauges.get(name, {}).items()}


def _step_totals(rank: RankStats) -> Iterable[tuple[tuple[int, int, str, str], float]]:
    """How often each hop of a step was passed, and the seconds that it took in all."""
    for hop in STEP_HOPS:
        if (seen := rank.counts.histograms.get(f"step_{hop}_time_seconds")) is not None:
            yield (rank.dp_rank, rank.incarnation, hop, "times"), sum(seen.counts)
            yield (rank.dp_rank, rank.incarnation, hop, "seconds"), seen.total


def _means(rates: dict[tuple[int, int, str, str], float], rank: RankStats) -> dict[str, float]:
    of = rank.dp_rank, rank.incarnation
    times = {hop: rates.get((*of, hop, "times"), 0.0) for hop in STEP_HOPS}
    return {hop: round(rates[(*of, hop, "seconds")] / times[hop], 7) for hop in STEP_HOPS if times[hop]}


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
