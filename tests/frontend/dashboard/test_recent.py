"""Percentiles of the last minute and rates of the last seconds."""

import pytest

from meshlm.frontend.dashboard.snapshot import SPAN_S, WINDOW_S, Rates, Times, percentiles
from meshlm.protocol.dashboard import Percentiles


def test_percentiles_are_right_to_two_percent() -> None:
    times = Times()
    for number in range(1, 1001):
        times.observe(number / 1000, 5.0)
    found = percentiles(times.buckets(5.0))
    assert found.count == 1000
    assert [found.p50, found.p90, found.p99] == pytest.approx([0.5, 0.9, 0.99], rel=0.021)


def test_durations_count_as_often_as_they_were_seen_and_for_a_minute() -> None:
    times = Times()
    times.observe(0.1, 10.0, times=99)
    times.observe(10.0, 11.0)
    assert percentiles(times.buckets(11.0)).p99 == pytest.approx(0.1, rel=0.021)
    later = percentiles(times.buckets(10.5 + WINDOW_S))
    assert later.count == 1
    assert later.p50 == pytest.approx(10.0, rel=0.021)
    assert percentiles(times.buckets(100.0)) == Percentiles(0, 0.0, 0.0, 0.0)


def test_no_time_at_all_is_a_time() -> None:
    times = Times()
    times.observe(0.0, 1.0)
    assert 0 < percentiles(times.buckets(1.0)).p50 < 1e-5


def test_a_rate_follows_a_count_that_is_told_in_steps() -> None:
    """A heartbeat comes twice a second, a snapshot ten times."""
    rates = Rates()
    found = [rates.of({"link": 100 * (tick // 5)}, tick / 10)["link"] for tick in range(60)]
    assert found[0] == 0
    assert all(180 < rate < 220 for rate in found[15:])


def test_a_rate_falls_to_nothing_when_the_count_stands_still() -> None:
    rates = Rates()
    for tick in range(30):
        rates.of({"link": 10 * tick}, tick / 10)
    found = [rates.of({"link": 290}, 3 + tick / 10)["link"] for tick in range(int(10 * SPAN_S) + 25)]
    assert found[0] > 50
    assert found[-1] == 0


def test_a_count_that_began_anew_has_no_negative_rate() -> None:
    rates = Rates()
    for now, total in ((0.0, 1000), (0.5, 2000), (1.0, 5), (1.5, 10)):
        assert rates.of({"link": total}, now)["link"] >= 0
    assert rates.of({}, 2.0) == {}
    assert rates.of({"link": 500}, 2.5) == {"link": 0.0}, "it was forgotten"
