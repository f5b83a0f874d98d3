"""Curves of steps' times go through what was measured, and are as short as that allows elsewhere."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.scheduler_proc.step_times import STALE_STEPS, Curve, StepTimes, drafts_at, place_of

MS = 1e-3
DRAFTS = 8


def seconds(curve: Curve, drafts: float) -> float:
    return float(curve.seconds(np.array([drafts]))[0])


def learnt(times: StepTimes, num_rows: int) -> Curve:
    curve = times.curve(num_rows)
    assert curve is not None
    return curve


@given(st.integers(1, 500), st.integers(0, 4000))
def test_places_are_in_order_and_stand_for_what_is_near(num_rows: int, num_drafts: int) -> None:
    drafts = num_drafts / num_rows
    assert place_of(drafts) <= place_of(drafts + 1 / num_rows)
    assert place_of(drafts_at(place_of(drafts))) == place_of(drafts)
    if drafts >= 1 / 8:
        assert 0.7 < drafts_at(place_of(drafts)) / drafts < 1.42


@given(st.lists(st.tuples(st.floats(0, DRAFTS), st.floats(1e-4, 1.0)), min_size=1, max_size=40))
def test_more_drafts_never_take_less(steps: list[tuple[float, float]]) -> None:
    curve = Curve(DRAFTS)
    for drafts, duration_s in steps:
        curve.learn(drafts, duration_s)
    drawn = curve.seconds(np.linspace(0, DRAFTS, 100))
    assert np.all(np.diff(drawn) >= 0)
    assert np.all(drawn > 0)


def test_what_is_not_known_is_as_short_as_its_neighbours_allow() -> None:
    curve = Curve(DRAFTS)
    curve.learn(DRAFTS, 9 * MS)
    assert seconds(curve, 0) == pytest.approx(1 * MS)  # tokens could cost all of it ...
    curve.learn(0, 6 * MS)
    assert seconds(curve, 1) == pytest.approx(6 * MS)  # ... or nothing
    curve.learn(1, 7 * MS)
    assert seconds(curve, 1) == pytest.approx(7 * MS)
    assert seconds(curve, 4) == pytest.approx(7 * MS)


def test_it_follows_and_is_not_upset_by_one_long_step() -> None:
    curve, dice = Curve(DRAFTS), random.Random(1)
    for _ in range(200):
        curve.learn(2, 5 * MS * dice.uniform(0.8, 1.2))
    assert seconds(curve, 2) == pytest.approx(5 * MS, rel=0.05)
    curve.learn(2, 3.0)
    assert seconds(curve, 2) < 6.5 * MS
    for _ in range(100):
        curve.learn(2, 8 * MS)
    assert seconds(curve, 2) == pytest.approx(8 * MS, rel=0.02)


def test_points_of_long_ago_are_stale_until_they_are_asked_for() -> None:
    curve = Curve(DRAFTS)
    curve.learn(1, 2 * MS)
    curve.learn(2, 2 * MS)
    for _ in range(STALE_STEPS):
        curve.learn(0, MS)
    assert curve.stale() == [place_of(1), place_of(2)]
    curve.ask(place_of(1))
    assert curve.stale() == [place_of(2)]


def test_curves_by_rows() -> None:
    times = StepTimes(DRAFTS)
    assert times.nearest(3) is None
    times.learn(8, 0, 5 * MS)
    times.learn(64, 0, 20 * MS)
    assert times.curve(24) is None
    assert seconds(learnt(times, 10), 0) == 5 * MS
    assert times.nearest(40) is times.curve(64) is not None
    assert times.nearest(1) is times.curve(8) is not None


@pytest.mark.parametrize("duration_s", [0.0, 1e-9, -1.0, math.inf, math.nan])
def test_what_was_not_measured_teaches_nothing(duration_s: float) -> None:
    times = StepTimes(DRAFTS)
    times.learn(4, 4, duration_s)
    times.learn(0, 0, MS)
    assert times.nearest(4) is None
