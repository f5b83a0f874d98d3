"""Percentiles and rates of the last seconds. Pure; used by feed.py and snapshot.py."""

import math
from collections import deque
from collections.abc import Hashable, Mapping
from typing import TypeVar

from meshlm.protocol.dashboard import Percentiles

WINDOW_S = 60  # of percentiles
BUCKETS_PER_E = 25  # so a percentile is right to 2 percent
SPAN_S = 2.0  # that rates cover
STILL_S = 1.6  # when a count that stands still shows in them: some are told once a second

Key = TypeVar("Key", bound=Hashable)


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
