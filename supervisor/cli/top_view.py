"""What `meshlm top` draws. Imported by that command alone: rich is an extra.

Columns are padded here: rich's own tables measure each cell several times, which is most of what a drawing would cost.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshlm.protocol.dashboard import NewsView, Percentiles, ProcessView, RankView, RequestView, Snapshot
from meshlm.runtime.process.readable import readable

MAX_CELL = 48
NUM_REQUESTS, NUM_NEWS = 8, 5
STYLES = {"ready": "green", "starting": "yellow", "stopping": "yellow", "standby": "cyan", "loading": "yellow"}
BAR = 10
Cell = tuple[str, str]  # text and style


class Screen:
    """The terminal, or whatever `console` writes to."""

    def __init__(self, console: Console, server: str) -> None:
        self._console, self._server = console, server
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._last: Snapshot | None = None
        self._news: deque[NewsView] = deque(maxlen=NUM_NEWS)

    def __enter__(self) -> "Screen":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def has_drawn(self) -> bool:
        return self._last is not None

    def add(self, news: Iterable[NewsView]) -> None:
        """News, of which some may be known."""
        for one in news:
            if not self._news or one.at_s > self._news[-1].at_s:
                self._news.append(one)

    def show(self, snapshot: Snapshot) -> None:
        self.add(snapshot.news)
        for line in view(snapshot, self._server, self._news):
            self._console.print(line, soft_wrap=True)

    def draw(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        self.add(snapshot.news)
        self._update(view(snapshot, self._server, self._news))

    def lost(self, why: str) -> None:
        """The last figures, and that they are old."""
        assert self._last is not None
        note = Text(f"not connected: {readable(why)}; these figures are old", "bold red")
        self._update([note, *view(self._last, self._server, self._news)])

    def _update(self, lines: list[Text]) -> None:
        """Draws as much as there is room for."""
        for line in lines:
            line.truncate(self._console.width, overflow="ellipsis")
        self._live.update(Text("\n").join(lines[: self._console.height]), refresh=True)


def view(snapshot: Snapshot, server: str, news: Iterable[NewsView]) -> list[Text]:
    """The whole picture by line, the most important on top: a terminal that is too low shows the beginning."""
    parts = [_head(snapshot, server), _figures(snapshot), Text(), *_ranks(snapshot.ranks), Text()]
    parts += [*_processes([*snapshot.processes, *snapshot.standbys]), Text(), *_requests(snapshot)]
    return [*parts, Text(), *_news(news)]


def _head(snapshot: Snapshot, server: str) -> Text:
    reason = snapshot.reason or snapshot.missing or snapshot.blocked
    if snapshot.paused:
        state: Cell = ("paused", "bold yellow")
    elif not snapshot.serving:
        state = (f"not serving: {readable(reason)}", "bold red")
    else:
        state = (f"serving; {readable(reason)}", "bold yellow") if reason else ("serving", "bold green")
    where = f"  {server}  {snapshot.frontend}, {time.strftime('%H:%M:%S', time.localtime(snapshot.at_s))}"
    return Text.assemble(("MeshLM ", "bold"), readable(snapshot.model), "  ", state, (where, "dim"))


def _figures(snapshot: Snapshot) -> Text:
    running = sum(rank.running for rank in snapshot.ranks)
    waiting = sum(rank.waiting for rank in snapshot.ranks) + snapshot.num_held
    return Text.assemble(
        (f"{snapshot.generated_per_s:,.0f}", "bold"), " tokens/s  ",
        (f"{snapshot.prompt_per_s:,.0f}", "bold"), " prompt tokens/s  ",
        (str(running), "bold"), " running  ", (str(waiting), "bold yellow" if waiting else "bold"), " waiting  ",
        "TTFT ", (_percentiles(snapshot.ttft), "bold"), "  ITL ", (_percentiles(snapshot.itl), "bold"),
    )  # fmt: skip


def _percentiles(times: Percentiles) -> str:
    return " / ".join(seconds(value) for value in (times.p50, times.p90, times.p99)) if times.count else "-"


def seconds(value: float) -> str:
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def _ranks(ranks: Iterable[RankView]) -> list[Text]:
    rows: list[list[Cell]] = []
    for rank in ranks:
        groups = ", ".join(f"{readable(name)} {count}" for name, count in rank.kv_groups.items())
        step = "  ".join(f"{name} {seconds(value)}" for name, value in rank.step.items())
        rows.append([
            (_rank(rank), "bold"), (str(rank.running), ""), (str(rank.waiting), "yellow" if rank.waiting else ""),
            _share(rank.kv_usage, 0.9), (groups, ""), (f"{rank.hit_rate:.0%}", ""), (f"{rank.generated_per_s:,.0f}", ""),
            (f"{rank.prompt_per_s:,.0f}", ""), _share(rank.busy, 2.0), (str(rank.preemptions), ""), (_balance(rank), ""),
            (_drafts(rank), ""), (step, "dim"),
        ])  # fmt: skip
    names = "rank# run# wait# KV groups hits# tokens/s# prompt/s# device preempt# experts# drafts# step"
    return _table(names.split(" "), rows)


def _rank(rank: RankView) -> str:
    """Its number, and with --dp-roles its role and the requests that it has handed off."""
    hand_offs = f" {rank.hand_offs:,} →" if rank.hand_offs else ""
    return f"{rank.rank} {rank.role}{hand_offs}".rstrip()


def _balance(rank: RankView) -> str:
    loads = rank.expert_loads
    most = max(loads, default=0)
    return f"{sum(loads) / len(loads) / most:.0%}" if most else "-"


def _drafts(rank: RankView) -> str:
    """The share of drafted tokens that were accepted, and the tokens of a step."""
    return "-" if rank.accepted is None or rank.accepted_len is None else f"{rank.accepted:.0%} {rank.accepted_len:.1f}"


def _share(value: float, high: float) -> Cell:
    filled = round(min(1.0, value) * BAR)
    return f"{'█' * filled}{'░' * (BAR - filled)} {value:4.0%}", "red" if value >= high else ""


def _processes(processes: Sequence[ProcessView]) -> list[Text]:
    nodes = any(one.node for one in processes)
    rows: list[list[Cell]] = []
    for one in processes:
        row: list[Cell] = [(readable(one.name, MAX_CELL), "bold")]
        row += [(readable(one.node, MAX_CELL), "")] if nodes else []
        row += [
            (one.state, STYLES.get(one.state, "bold red")), (str(one.restarts), "yellow" if one.restarts else ""),
            (seconds(one.uptime_s), ""), (f"{one.rss_bytes / 1e6:,.0f} MB", ""), (readable(one.phase, MAX_CELL), "dim"),
        ]  # fmt: skip
        rows.append(row)
    return _table(["process", *(["node"] if nodes else []), "state", "restarts#", "uptime#", "memory#", "doing"], rows)


def _requests(snapshot: Snapshot) -> list[Text]:
    rows = [_request(one) for one in snapshot.running[:NUM_REQUESTS]]
    oldest = f"the oldest of {snapshot.num_open} open requests"
    if not rows:
        return [Text("no open requests", "dim")]
    return _table([oldest, "time#", "output#", "rank", "where it is"], rows)


def _request(request: RequestView) -> list[Cell]:
    hops = "  ".join(f"{readable(name, MAX_CELL)} {seconds(value)}" for name, value in request.hops.items())
    again = f", attempt {request.num_attempts}" if request.num_attempts > 1 else ""
    return [
        (readable(request.id, MAX_CELL), ""), (seconds(request.seconds), "bold"), (str(request.num_output_tokens), ""),
        (request.rank or "-", ""), (hops + again, "dim"),
    ]  # fmt: skip


def _news(news: Iterable[NewsView]) -> list[Text]:
    lines = []
    for one in news:
        at = time.strftime("%H:%M:%S ", time.localtime(one.at_s))
        lines.append(Text.assemble((at, "dim"), (readable(one.text), "red" if one.level == "error" else "")))
    return lines


def _table(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[Text]:
    """Lines of padded cells; what a name with # stands above is a number."""
    right = [name.endswith("#") for name in names]
    head = [name.removesuffix("#") for name in names]
    widths = [max([len(name), *(len(row[place][0]) for row in rows)]) for place, name in enumerate(head)]
    lines = [_line([(name, "dim") for name in head], widths, right)]
    return lines + [_line(row, widths, right) for row in rows]


def _line(cells: Sequence[Cell], widths: Sequence[int], right: Sequence[bool]) -> Text:
    line = Text()
    for (text, style), width, is_number in zip(cells, widths, right, strict=True):
        line.append(text.rjust(width) if is_number else text.ljust(width), style or None)
        line.append("  ")
    return line
