"""Frames: round trip, and nothing but FrameError for what is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.frames import FrameError, Header, Kind, pack, unpack
from meshlm.protocol.ids import Identity, Incarnation, Role

u64 = st.integers(0, (1 << 64) - 1)
identities = st.builds(Identity, st.sampled_from(Role), st.integers(0, 65535))
headers = st.builds(
    Header, st.sampled_from(Kind), identities, identities, u64.map(Incarnation), u64.map(Incarnation), u64, u64
)


@given(headers, st.binary())
def test_round_trip(header: Header, body: bytes) -> None:
    got, rest = unpack(pack(header, body))
    assert got == header
    assert bytes(rest) == body


@given(st.binary(max_size=200))
def test_random_bytes_are_no_frame_or_parse(data: bytes) -> None:
    try:
        unpack(data)
    except FrameError:
        return
    assert data.startswith(b"ML")


def test_short_frame_says_so() -> None:
    with pytest.raises(FrameError, match="shorter"):
        unpack(b"ML")
