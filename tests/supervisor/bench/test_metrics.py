"""What `bench serve` says of its requests, and when it sends them: vLLM's names, known numbers."""

import math
import random

import pytest

from meshlm.supervisor.bench import results
from meshlm.supervisor.bench.results import Measured
from meshlm.supervisor.bench.serve import RampUp, delays

RESULTS = [
    Measured(10.0, True, "", 5, 3, 0.5, 1.5, [0.4, 0.6], "abc"),
    Measured(10.2, True, "", 7, 1, 0.1, 0.1, [], "d"),
    Measured(10.3, False, "broken\nhere", 9),
]


def test_sums_have_vllms_names() -> None:
    found = results.summed_up(RESULTS, 2.0, {"ttft": 200.0})
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 4)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1.0, 2.0, 8.0)
    assert found["request_goodput"] == 0.5
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (3.0, 2)
    assert (found["input_lens"], found["output_lens"]) == ([5, 7, 9], [3, 1, 0])
    assert found["errors"] == ["", "", "broken\nhere"]
    assert results.summed_up(RESULTS, 2.0, {})["request_goodput"] is None
    assert results.summed_up(RESULTS[2:], 2.0, {"e2el": 1.0})["completed"] == 0


@pytest.mark.parametrize(
    ("limits", "good"), [({"ttft": 500, "e2el": 1500}, 2), ({"tpot": 499}, 1), ({"tpot": 500}, 2), ({"e2el": 99}, 0)]
)
def test_a_good_request_keeps_all_limits(limits: dict[str, float], good: int) -> None:
    assert results.summed_up(RESULTS, 1.0, limits)["request_goodput"] == good


def test_spreads() -> None:
    found = results.spread(RESULTS, "ttft", [25.0, 99.9])
    assert {name: round(value, 3) for name, value in found.items()} == {
        "mean_ttft_ms": 300.0,
        "median_ttft_ms": 300.0,
        "std_ttft_ms": 200.0,
        "p25_ttft_ms": 200.0,
        "p99.9_ttft_ms": 499.6,
    }
    assert results.spread(RESULTS, "tpot", [])["mean_tpot_ms"] == pytest.approx(500)  # an answer of one token has none
    assert results.spread(RESULTS, "itl", [])["median_itl_ms"] == pytest.approx(500)
    assert results.spread([], "e2el", [50.0])["p50_e2el_ms"] == 0.0


def source() -> random.Random:
    return random.Random(1)


def test_all_at_once() -> None:
    assert delays(3, math.inf, 1.0, None, source()) == [0, 0, 0]


def test_the_last_comes_at_its_time_however_bursty() -> None:
    for burstiness in (0.1, 1.0, 10.0):
        assert delays(50, 5.0, burstiness, None, source())[-1] == pytest.approx(10.0)
    assert delays(4, 2.0, math.inf, None, source()) == [0.5, 1.0, 1.5, 2.0]


def test_burstiness_is_the_gamma_distributions_shape() -> None:
    def variation(burstiness: float) -> float:
        times = delays(4000, 1.0, burstiness, None, source())
        gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        return sum((gap - 1) ** 2 for gap in gaps) / len(gaps)

    for burstiness in (0.5, 1.0, 4.0):
        assert variation(burstiness) == pytest.approx(1 / burstiness, rel=0.15)


@pytest.mark.parametrize(("strategy", "halfway"), [("linear", 5.0), ("exponential", 3.0)])
def test_the_rate_ramps_up(strategy: str, halfway: float) -> None:
    ramp = RampUp(strategy, 1, 9)
    assert (ramp.rate(0), ramp.rate(0.5), ramp.rate(1)) == pytest.approx((1, halfway, 9))
    assert delays(3, math.inf, math.inf, ramp, source()) == pytest.approx([1, 1 + 1 / halfway, 1 + 1 / halfway + 1 / 9])
