"""benchmarks/scheduler.py: steps in which all requests decode, however many prompts a step takes."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def scheduler(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("scheduler")


@pytest.mark.parametrize("num_requests", [1, 1000])
def test_steady_decodes_are_measured(scheduler: ModuleType, num_requests: int) -> None:
    """The prompts of 1,000 are more than a step's token budget."""
    ones = [scheduler.Steady(num_requests, 5, specs) for specs in scheduler.KINDS.values()]
    for measured in scheduler.medians_of(ones, 5):
        assert all(measured[name] > 0 for name in ("plan_us", "result_us"))


def test_drafts_are_measured_beside_as_many_tokens(scheduler: ModuleType) -> None:
    measured = scheduler.drafting(20, 5)
    assert 20 < measured["drafts_tokens_per_step"] <= 100
    assert measured["drafts_times_plain"] > 0


def test_hashing_is_measured(scheduler: ModuleType) -> None:
    assert scheduler.hashing(320) > 0
