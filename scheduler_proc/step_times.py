"""How long steps without prompts take, by their rows and by the drafts of a row, learnt from finished steps. Pure; owned by
draft_budget.py.

A row costs more than its token, since its keys and values are read; so steps with about as many rows have a curve of their own. What a
curve does not know yet it takes for as short as what it knows allows: it is tried where that would be worth it, and is known then.
"""

from dataclasses import dataclass
from math import inf, log2

import numpy as np

from meshlm.scheduler_proc.acceptance import F64
from meshlm.scheduler_proc.budget import SHORTEST_STEP_S

SMOOTHING = 0.06
FURTHEST = 4.0  # a time that is so many times another was disturbed
STALE_STEPS = 64  # a time is looked at again after so many steps of its curve


@dataclass(slots=True)
class Point:
    """What is known of steps with about so many drafts a row."""

    drafts: float  # a row, on average
    seconds: float
    num_steps: int = 0
    last: int = 0  # the curve's step that was or will be the last one here


def place_of(drafts: float) -> int:
    """The point for so many drafts a row: none, octaves up to one, half octaves beyond."""
    return 1 + max(0, 3 + round(log2(drafts) * (1 if drafts < 1 else 2))) if drafts else 0


def drafts_at(place: int) -> float:
    """The middle of what a point stands for, in drafts a row."""
    return 2.0 ** ((place - 4) / (1 if place < 4 else 2)) if place else 0.0


class Curve:
    """Steps with about as many rows, up to `max_drafts` drafts each."""

    def __init__(self, max_drafts: int) -> None:
        self._points: dict[int, Point] = {}
        self._places = range(place_of(max_drafts) + 1)
        self._num_steps = 0
        # By place: the least that a step there takes, as its neighbours say, since it is no quicker than one with fewer drafts, nor its
        # tokens than those of one with more.
        self.least_s: list[float] = []
        self._drafts, self._seconds = np.zeros(1), np.zeros(1)

    def learn(self, drafts: float, duration_s: float) -> None:
        """A step with so many drafts a row took so long."""
        self._num_steps += 1
        place = place_of(drafts)
        point = self._points.setdefault(place, Point(drafts, duration_s))
        point.num_steps += 1
        point.last = self._num_steps
        weight = max(SMOOTHING, 1 / point.num_steps)
        before_s = min(point.seconds, FURTHEST * duration_s)
        point.seconds = before_s + weight * (min(duration_s, FURTHEST * before_s) - before_s)
        point.drafts += weight * (drafts - point.drafts)
        self._draw()

    def seconds(self, drafts: F64) -> F64:
        """The time of steps with so many drafts a row; more drafts never take less."""
        return np.interp(drafts, self._drafts, self._seconds)

    def _draw(self) -> None:
        """Draws the curve through the points, and through the least that those can be which are not known."""
        fewer_s = each_s = 0.0
        tokens_s: list[float] = []  # of a token in the next known step with more drafts, from the last place on
        for place in reversed(self._places):
            tokens_s.append(each_s)
            if (point := self._points.get(place)) is not None:
                each_s = point.seconds / (1 + point.drafts)
        self.least_s = []
        drawn: list[tuple[float, float]] = []
        for place, each_s in zip(self._places, reversed(tokens_s), strict=True):
            self.least_s.append(max(fewer_s, each_s * (1 + drafts_at(place))))
            if (point := self._points.get(place)) is not None:
                fewer_s = max(fewer_s, point.seconds)
                drawn.append((point.drafts, fewer_s))
            else:
                drawn.append((drafts_at(place), self.least_s[-1]))
        self._drafts, self._seconds = np.array(drawn).T

    def stale(self) -> list[int]:
        """Points of long ago, the oldest first."""
        stale = [at for at, point in self._points.items() if self._num_steps - point.last >= STALE_STEPS]
        return sorted(stale, key=lambda at: self._points[at].last)

    def ask(self, place: int) -> None:
        """A step there was planned: until its result is here the point is not stale."""
        self._points[place].last = self._num_steps


class StepTimes:
    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._curves: dict[int, Curve] = {}

    def learn(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        """A step with so many decoding rows, no prompts and so many drafts in all took so long."""
        if num_rows and SHORTEST_STEP_S <= duration_s < inf:
            curve = self._curves.setdefault(_kind(num_rows), Curve(self._max_drafts))
            curve.learn(num_drafts / num_rows, duration_s)

    def curve(self, num_rows: int) -> Curve | None:
        """Of steps with about so many rows; None: there was none yet."""
        return self._curves.get(_kind(num_rows))

    def nearest(self, num_rows: int) -> Curve | None:
        """Of steps with as nearly so many rows as there were any."""
        kind = min(self._curves, key=lambda kind: abs(kind - _kind(num_rows)), default=None)
        return None if kind is None else self._curves[kind]


def _kind(num_rows: int) -> int:
    """The same for numbers within half an octave."""
    return 2 * num_rows.bit_length() + (num_rows >> max(0, num_rows.bit_length() - 2) & 1)
