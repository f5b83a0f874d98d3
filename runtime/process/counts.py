"""Counts of this process for /metrics: plain numbers, so that an observation costs as little as adding to a list.

Owned by a process's core; `told` is what it sends of them (protocol/counts.py).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

from meshlm.protocol.counts import HistogramCounts, Metric, ProcessCounts

# Clocks of two hosts have nothing in common: what seems to have taken longer, or less than nothing, is no hop of this host.
LONGEST_HOP_S = 60.0


class Histogram:
    """Observations by bucket."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._total = buckets, [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def between(self, begin_ns: int, end_ns: int) -> None:
        """Observes the seconds between two moments of the monotonic clock, where both are of this host."""
        seconds = (end_ns - begin_ns) / 1e9
        if begin_ns and 0 <= seconds < LONGEST_HOP_S:
            self.observe(seconds)

    def told(self) -> HistogramCounts:
        return HistogramCounts(self._total, tuple(self._counts))


class Counts:
    """All metrics of a table of protocol/counts.py."""

    def __init__(self, table: Mapping[str, Metric]) -> None:
        self.histograms = {name: Histogram(one.buckets) for name, one in table.items() if one.kind == "histogram"}
        self._counters: dict[str, defaultdict[str, float]] = {
            name: defaultdict(float) for name, one in table.items() if one.kind == "counter"
        }
        self.gauges: dict[str, dict[str, float]] = {name: {} for name, one in table.items() if one.kind == "gauge"}

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        self._counters[name][label] += amount

    def told(self) -> ProcessCounts:
        return ProcessCounts(
            {name: dict(counts) for name, counts in self._counters.items() if counts},
            {name: dict(values) for name, values in self.gauges.items() if values},
            {name: histogram.told() for name, histogram in self.histograms.items()},
        )
