"""Frames: round trip, and nothing but FrameError for what is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.wire.frames import (
    FRAME_PREFIX_BYTES,
    FrameError,
    Header,
    Kind,
    data_frame_prefix,
    pack,
    pack_numbers,
    unpack,
    unpack_numbers,
)
from meshlm.protocol.wire.ids import Identity, Incarnation, Role

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


@given(headers, st.binary())
def test_a_data_frame_is_its_lane_its_numbers_and_its_body(header: Header, body: bytes) -> None:
    frame = pack(header._replace(kind=Kind.DATA), body)
    frame_prefix = data_frame_prefix(header.sender, header.sender_epoch, header.receiver, header.receiver_epoch)
    assert frame_prefix + pack_numbers(header.seq, header.ack) + body == frame
    assert len(frame_prefix) == FRAME_PREFIX_BYTES
    assert unpack_numbers(frame, FRAME_PREFIX_BYTES) == (header.seq, header.ack)


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
