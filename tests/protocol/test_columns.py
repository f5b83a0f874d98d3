"""Columns of numbers that advance together."""

from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.columns import Counters, ints


@given(st.lists(st.integers(0, (1 << 31) - 1000), max_size=40), st.lists(st.integers(1, 9), max_size=20))
def test_each_counter_advances_by_itself(values: list[int], steps: list[int]) -> None:
    counters = Counters(values)
    for step in steps:
        counters.advance(step)
    assert ints(counters.column()) == [value + sum(steps) for value in values]
