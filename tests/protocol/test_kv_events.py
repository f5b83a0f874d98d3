"""The events' wire form: what subscribers of vLLM's, newer and older, read of it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol import kv_events
from meshlm.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, KVEvent, KVEventBatch

STORED = BlockStored([3, 1 << 63], 7, [1, 2, 3, 4], 2, None, "GPU", None, [("salt",), None], 0, "full_attention")
BATCH = KVEventBatch(1.5, [AllBlocksCleared(), STORED, BlockRemoved([3], "GPU", 1)], 2)


class Older(msgspec.Struct, array_like=True, tag=True):
    """What a subscriber of 2025 has of an event."""


class OlderStored(Older, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OlderRemoved(Older, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class OlderCleared(Older, array_like=True, tag="AllBlocksCleared"):
    pass


class OlderBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OlderStored | OlderRemoved | OlderCleared]


def test_maps_are_what_vllm_sends() -> None:
    found = msgspec.msgpack.decode(kv_events.encode(BATCH, "map"))
    assert found == [
        1.5,
        [
            {"type": "AllBlocksCleared"},
            {
                "type": "BlockStored",
                "block_hashes": [3, 1 << 63],
                "parent_block_hash": 7,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["salt"], None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU", "group_idx": 1},
        ],
        2,
    ]


def test_arrays_are_what_older_subscribers_read() -> None:
    read = msgspec.msgpack.decode(kv_events.encode(BATCH, "array"), type=OlderBatch)
    stored = OlderStored([3, 1 << 63], 7, [1, 2, 3, 4], 2, None, "GPU")
    assert read == OlderBatch(1.5, [OlderCleared(), stored, OlderRemoved([3], "GPU")])


INTS = st.lists(st.integers(0, (1 << 64) - 1), max_size=4)
EVENTS: st.SearchStrategy[KVEvent] = st.one_of(
    st.builds(AllBlocksCleared),
    st.builds(BlockRemoved, INTS, st.just("GPU"), st.none() | st.integers(0, 3)),
    st.builds(
        BlockStored,
        INTS,
        st.none() | st.integers(0, (1 << 64) - 1),
        st.lists(st.integers(0, 99)),
        st.integers(1, 128),
        st.none(),
        st.just("GPU"),
        st.none(),
        st.none() | st.lists(st.none() | st.tuples(st.text() | st.binary())),
        st.none() | st.integers(0, 3),
    ),
)


@pytest.mark.parametrize("encoding", ["map", "array"])
@given(events=st.lists(EVENTS, max_size=3), rank=st.none() | st.integers(0, 9))
def test_what_is_written_is_read(encoding: Encoding, events: list[KVEvent], rank: int | None) -> None:
    read = kv_events.decode(kv_events.encode(KVEventBatch(2.0, events, rank), encoding))
    assert plain(read) == plain(KVEventBatch(2.0, events, rank))


def plain(batch: KVEventBatch) -> Any:
    """Tuples are lists on the wire."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(batch))


def test_hashes_are_the_last_eight_bytes() -> None:
    assert kv_events.hash_of(bytes(range(32))) == int.from_bytes(bytes(range(24, 32)), "big")
    assert kv_events.hash_of(b"\xff" * 32) == (1 << 64) - 1


@pytest.mark.parametrize(
    ("address", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
        ("ipc:///run/kv", 2, "ipc:///run/kv_dp2"),
        ("", 2, ""),
    ],
)
def test_each_rank_has_an_address(address: str, rank: int, expected: str) -> None:
    assert kv_events.address_of_rank(address, rank) == expected


def test_who_listens() -> None:
    assert all(map(kv_events.is_bound, ("tcp://*:1", "tcp://[::]:1", "tcp://0.0.0.0:1", "ipc:///a")))
    assert not kv_events.is_bound("tcp://router:5557")
