"""Estimates of acceptance follow what was accepted, position by position, and begin with the mean of the rank."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.scheduler_proc.acceptance import FIRST_MEAN, Acceptance

ROWS, DRAFTS = 6, 4


def gains(acceptance: Acceptance, row: int) -> list[float]:
    found: list[float] = acceptance.gains(np.array([row]))[0].tolist()
    return found


@st.composite
def steps(draw: st.DrawFn) -> list[dict[int, tuple[int, int]]]:
    """By row: drafts allowed and accepted."""
    pairs = st.integers(1, DRAFTS).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most)))
    return draw(st.lists(st.dictionaries(st.integers(0, ROWS - 1), pairs, min_size=1), max_size=30))


@given(steps())
def test_further_drafts_gain_less_and_all_are_probabilities(history: list[dict[int, tuple[int, int]]]) -> None:
    acceptance = Acceptance(ROWS, DRAFTS)
    for step in history:
        acceptance.observe(*zip(*((row, *pair) for row, pair in step.items()), strict=True))
    for row in range(ROWS):
        found = gains(acceptance, row)
        assert all(1 >= before >= after >= 0 for before, after in pairwise(found))
        assert 0 < found[0] <= 1


def test_it_finds_each_position_s_acceptance() -> None:
    """Also where the worker drafted nothing, which is no other failure than a refusal."""
    dice, real = random.Random(1), (0.8, 0.5, 0.9, 0.3)
    acceptance, seen = Acceptance(ROWS, DRAFTS), []
    for _ in range(1500):
        count = next((position for position in range(DRAFTS) if dice.random() > real[position]), DRAFTS)
        acceptance.observe([2], [DRAFTS], [count])
        seen.append(gains(acceptance, 2))
    mean = np.mean(seen[200:], axis=0)
    assert mean == pytest.approx(np.cumprod(real), abs=0.05)


def test_a_position_that_no_step_reached_is_taken_for_the_one_before() -> None:
    acceptance = Acceptance(ROWS, DRAFTS)
    for _ in range(500):
        acceptance.observe([0], [1], [1])
    assert gains(acceptance, 0)[-1] > 0.9
    for _ in range(500):
        acceptance.observe([0], [1], [0])
    assert gains(acceptance, 0)[1] < 0.01


def test_another_request_begins_with_the_mean_of_the_rank() -> None:
    acceptance = Acceptance(ROWS, DRAFTS)
    assert gains(acceptance, 1)[0] == FIRST_MEAN
    for _ in range(300):
        acceptance.observe([0, 1], [2, 2], [2, 0])
    bad = gains(acceptance, 1)[0]
    acceptance.begin(1)
    assert bad < 0.1
    assert gains(acceptance, 1) == gains(acceptance, 5)
    assert 0.4 < gains(acceptance, 1)[0] < 0.6
