"""All metrics of the mesh in Prometheus' text format.

What frontends count is in files that they share (runtime/process/metrics.py): the library writes them, and they are read here, since
it takes 20 microseconds for each line of its own. All other processes' counts come with the mesh's figures (protocol/counts.py).
"""

import asyncio
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import REGISTRY, Collector
from prometheus_client.samples import Sample

from meshlm.protocol import counts
from meshlm.protocol.counts import ProcessCounts
from meshlm.protocol.edges.control import MeshStats

# The label of a count that another process keeps: its sum over that process' incarnations is the counter.
INCARNATION = "incarnation"
RANKS_AT_ONCE = 2
_PREFIX = re.compile(rb"^(# (?:HELP|TYPE) )?meshlm:", re.MULTILINE)
_two_doubles = struct.Struct("dd").unpack_from

Labels = tuple[tuple[str, str], ...]


def exposition(stats: MeshStats | None = None, model: str = "") -> bytes:
    """The metrics of all frontends, or of this one where nothing is shared, and of the processes that `stats` tells of."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        own = _SHARED.text()
    else:
        registry = CollectorRegistry()
        registry.register(_Summed(REGISTRY))
        own = generate_latest(registry)
    return own + "".join(_of_processes(stats, model)).encode() if stats is not None else own


async def scrape(stats: MeshStats, model: str) -> bytes:
    """The same while streams go on: many ranks take milliseconds, few less than a thread's turn."""
    if len(stats.ranks) <= RANKS_AT_ONCE:
        return exposition(stats, model)
    return await asyncio.to_thread(exposition, stats, model)


async def scrape_as_vllm(stats: MeshStats, model: str) -> bytes:
    """The same with the prefix of vLLM's names (--metrics-prefix)."""
    return _PREFIX.sub(rb"\1vllm:", await scrape(stats, model))


def escaped(value: str) -> str:
    """A label's value."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _series(name: str, labels: Iterable[tuple[str, str]]) -> str:
    """The beginning of a line, up to its value."""
    inside = ",".join(f'{key}="{escaped(value)}"' for key, value in sorted(labels))
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _head(name: str, text: str, kind: str) -> str:
    full = f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
    return f"# HELP {full} {text}\n# TYPE {full} {kind}\n"


# --- what frontends share ---


class _Family:
    """A metric's lines. A line's value is the sum of the places of `values` that it has; a bucket's, of those before it too."""

    def __init__(self, name: str, text: str, kind: str) -> None:
        self.name, self.text, self.kind = name, text, kind
        self.lines: dict[str, list[int]] = {}  # how it begins -> places
        self.buckets: dict[Labels, dict[float, int]] = {}


class SharedMetrics:
    """The frontends' files. Keys are read once: only values change."""

    def __init__(self) -> None:
        self._folder = ""
        # By process and kind of metric, as long as the file has the same keys: its length, and positions in it with places in `values`.
        self._files: dict[Path, tuple[int, list[tuple[int, int]]]] = {}
        self._places: dict[tuple[bool, str], int] = {}  # by key; gauges apart
        self._families: dict[str, _Family] = {}

    def text(self) -> bytes:
        folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
        if folder != self._folder:
            self.__init__()  # type: ignore[misc]
            self._folder = folder
        found = [(path, path.read_bytes()) for path in sorted(Path(folder).glob("*.db"))]
        for path, data in found:
            self._learn(path, data)
        values = self._values(found)
        return "".join(line for family in self._families.values() for line in _lines(family, values)).encode()

    def _learn(self, path: Path, data: bytes) -> None:
        """Notes where the keys of this file are, if it has new ones."""
        (used,) = struct.unpack_from("i", data)
        if path in self._files and self._files[path][0] == used:
            return
        kind = path.name.partition("_")[0]
        at = [
            (pos, self._place(kind, key))
            for key, _, _, pos in MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
            if pos + 16 <= len(data)
        ]
        self._files[path] = used, at

    def _place(self, kind: str, key: str) -> int:
        if (known := self._places.get((kind == "gauge", key))) is not None:
            return known
        place = self._places[kind == "gauge", key] = len(self._places)
        metric, name, labels, text = json.loads(key)
        if kind == "gauge" and INCARNATION in labels:
            kind, metric = "counter", metric.removesuffix("_total")
            del labels[INCARNATION]
        family = self._families.setdefault(metric, _Family(metric, text, kind))
        if name.endswith("_bucket") and kind == "histogram":
            end = float(labels.pop("le"))
            family.buckets.setdefault(tuple(sorted(labels.items())), {})[end] = place
        else:
            family.lines.setdefault(_series(name, labels.items()), []).append(place)
        return place

    def _values(self, found: list[tuple[Path, bytes]]) -> list[float]:
        """By place: sums over all processes; of gauges the newest."""
        values, newest = [0.0] * len(self._places), [-1.0] * len(self._places)
        for path, data in found:
            newest_counts = path.name.startswith("gauge")
            for position, place in self._files[path][1]:
                value, timestamp = _two_doubles(data, position)
                if not newest_counts:
                    values[place] += value
                elif timestamp > newest[place]:
                    values[place], newest[place] = value, timestamp
        return values


_SHARED = SharedMetrics()


def _lines(family: _Family, values: list[float]) -> Iterator[str]:
    yield _head(family.name, family.text, family.kind)
    for labels, buckets in family.buckets.items():
        ends = tuple(sorted(buckets))
        sums = tuple(accumulate(values[buckets[end]] for end in ends))
        yield _histogram(family.name, labels, ends) % (*sums, sums[-1])
    for begin, places in family.lines.items():
        yield f"{begin}{sum([values[place] for place in places])!r}\n"


@lru_cache(maxsize=8192)
def _histogram(name: str, labels: Labels, ends: tuple[float, ...]) -> str:
    """The lines of buckets, each with a place (%s) for how many there are up to its end, and of their count."""
    inside = "".join(f'{key}="{escaped(value)}",' for key, value in labels).replace("%", "%%")
    shown = ("+Inf" if end == float("inf") else repr(end) for end in ends)
    lines = [f'{name}_bucket{{{inside}le="{end}"}} %s\n' for end in shown]
    return "".join((*lines, _series(f"{name}_count", labels).replace("%", "%%"), "%s\n"))


# --- what other processes tell ---


def _of_processes(stats: MeshStats, model: str) -> Iterator[str]:
    ranks = [((("engine", str(rank.dp_rank)),), rank.counts) for rank in stats.ranks]
    others = [((("process", str(one.process)),), one.counts) for one in stats.counts]
    yield from _of_table(counts.SCHEDULER, [((*who, ("model_name", model)), told) for who, told in ranks])
    for table in (counts.DETOKENIZER, counts.STORE, counts.MEDIA):
        yield from _of_table(table, [((("model_name", model), *who), told) for who, told in others])


def _of_table(table: Mapping[str, counts.Metric], processes: list[tuple[Labels, ProcessCounts]]) -> Iterator[str]:
    for short, metric in table.items():
        name = f"meshlm:{short}"
        yield _head(name, metric.text, metric.kind)
        for labels, told in processes:
            if metric.kind == "histogram":
                if (found := told.histograms.get(short)) is not None:
                    ends = (*map(float, metric.buckets), float("inf"))
                    sums = tuple(accumulate(found.counts, initial=0.0))[1:]
                    yield _histogram(name, labels, ends) % (*sums, sums[-1])
                    yield f"{_series(f'{name}_sum', labels)}{found.total!r}\n"
                continue
            shown = f"{name}_total" if metric.kind == "counter" else name
            for value, number in (told.counters if metric.kind == "counter" else told.gauges).get(short, {}).items():
                whole = (*labels, (metric.label, value)) if metric.label else labels
                yield f"{_series(shown, whole)}{float(number)!r}\n"


# --- one frontend alone ---


class _Summed(Collector):
    """Another collector's counters, with the counts of a process's incarnations added up, so that they never fall."""

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        is_summed: Callable[[Metric], bool] = lambda metric: any(INCARNATION in one.labels for one in metric.samples)  # noqa: E731
        for metric in self._registry.collect():
            yield _counter(metric) if is_summed(metric) else metric


def _counter(metric: Metric) -> Metric:
    sums: dict[Labels, float] = {}
    for sample in metric.samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != INCARNATION))
        sums[labels] = sums.get(labels, 0.0) + sample.value
    found = Metric(metric.name.removesuffix("_total"), metric.documentation, "counter")
    found.samples = [Sample(metric.name, dict(labels), value) for labels, value in sums.items()]
    return found
