"""Columns of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.wire.columns import ints, pack_i32, unpack_i32


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=40))
def test_numbers_come_as_they_were(values: list[int]) -> None:
    assert ints(pack_i32(values)) == list(unpack_i32(pack_i32(values))) == values


def test_what_is_no_int32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        pack_i32([1 << 31])
    with pytest.raises(ValueError, match="3 bytes"):
        unpack_i32(b"abc")
