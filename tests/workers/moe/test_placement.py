"""Balanced placements: every expert is somewhere, ranks have as many slots each, and none has more to do than without."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.workers.moe.placement.balance import balance, balancedness, first_placement, rank_loads


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Tokens of each expert, slots beyond one for each, ranks."""
    ranks = draw(st.integers(1, 5))
    each = draw(st.integers(1, 6))
    copies = draw(st.integers(0, each * (ranks - 1)))
    load = st.lists(st.integers(0, 1000), min_size=each * ranks, max_size=each * ranks)
    return draw(load), copies * ranks, ranks


@given(cases(), st.data())
def test_what_placements_keep(case: tuple[list[int], int, int], data: st.DataObject) -> None:
    load, redundant, ranks = case
    first = first_placement(len(load), redundant, ranks)
    slots = first
    for _ in range(2):  # the second begins where the first one left
        found = balance(load, slots, first, ranks)
        assert set(found) == set(range(len(load))), "each expert has a replica"
        assert len(found) == len(load) + redundant
        peak = max(rank_loads(load, found, ranks))
        assert peak <= max(rank_loads(load, first, ranks)), "never above that of no replicas"
        assert peak <= max(rank_loads(load, slots, ranks))
        assert balance(load, found, first, ranks) == found, "nothing moves for nothing"
        slots, load = found, data.draw(st.permutations(load))


@given(cases())
def test_the_first_placement(case: tuple[list[int], int, int]) -> None:
    load, redundant, ranks = case
    first = first_placement(len(load), redundant, ranks)
    own, each = len(load) // ranks, len(first) // ranks
    for rank in range(ranks):
        held = first[rank * each : (rank + 1) * each]
        assert held[:own] == list(range(rank * own, (rank + 1) * own))
        assert set(held) == set(held[:own])


def test_a_hot_expert_gets_replicas_on_other_ranks() -> None:
    load = [900, 10, 10, 10, 10, 10, 10, 40]
    first = first_placement(8, 4, 4)
    found = balance(load, first, first, 4)
    assert [held.count(0) for held in (found[:3], found[3:6], found[6:9], found[9:])] == [1, 1, 1, 1]
    assert max(rank_loads(load, found, 4)) < 250 + 15
    assert balancedness(rank_loads(load, first, 4)) == pytest.approx(1000 / 4 / 910)
    assert balancedness(rank_loads(load, found, 4)) > 0.93


def test_without_redundancy_experts_are_dealt_out_anew() -> None:
    found = balance([8, 8, 1, 1], [0, 1, 2, 3], [0, 1, 2, 3], 2)
    assert rank_loads([8, 8, 1, 1], found, 2) == [9, 9]
    assert sum(a != b for a, b in zip(found, [0, 1, 2, 3], strict=True)) == 2, "two change places, no more"


def test_nothing_is_known() -> None:
    assert balance([0] * 4, [1, 0, 3, 2], [0, 1, 2, 3], 2) == [1, 0, 3, 2]
    assert balancedness([0.0, 0.0]) == 1.0
    assert Counter(first_placement(2, 4, 2)) == {0: 3, 1: 3}
