"""SubscribeKvEvents over the sockets of real publishers, and its messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2 as common

from meshlm.frontend.grpc import kv_events
from meshlm.frontend.grpc.kv_events import Subscriptions, message_of
from meshlm.protocol.config import KVEventsConfig
from meshlm.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch, encode
from meshlm.scheduler_proc.kv_publisher import KVPublisher, Place, local_sockets

LIMIT_S = 30
LARGE = (1 << 64) - 5  # as a number with a sign: -5


@pytest.fixture(autouse=True)
async def limit() -> AsyncIterator[None]:
    async with asyncio.timeout(LIMIT_S):
        yield


def published(tmp_path: Path, index: int, incarnation: int, *batches: list[KVEvent]) -> KVPublisher:
    """A scheduler that has said so much."""
    settings = KVEventsConfig(enabled=True, endpoint=f"ipc://{tmp_path}/outer-{index}", encoding="array")
    place = Place(index, local_sockets(tmp_path, index, incarnation))
    publisher = KVPublisher(settings, place, lambda: 1.5)
    for events in batches:
        publisher.publish(events)
    return publisher


def removed(*hashes: int) -> list[KVEvent]:
    return [BlockRemoved(list(hashes), "GPU")]


async def numbers(stream: Any, count: int) -> list[tuple[int, int]]:
    """Ranks and numbers of the next batches."""
    found = [await anext(stream) for _ in range(count)]
    return [(batch.dp_rank, batch.sequence_number) for batch in found]


async def test_a_stream_has_what_was_said_and_what_follows(tmp_path: Path) -> None:
    first = published(tmp_path, 0, 7, [AllBlocksCleared()], removed(1))
    second = published(tmp_path, 1, 7, [AllBlocksCleared()])
    subscriptions = Subscriptions(str(tmp_path))
    async with aclosing(subscriptions.stream(0)) as stream:
        assert sorted(await numbers(stream, 3)) == [(0, 0), (0, 1), (1, 0)]
        assert subscriptions.num_open == 1
        for number in range(2, 200):
            first.publish(removed(number))
        assert await numbers(stream, 198) == [(0, number) for number in range(2, 200)]
        second.publish(removed(5))
        assert await numbers(stream, 1) == [(1, 1)]
    assert subscriptions.num_open == 0
    first.close()
    second.close()


async def test_a_client_goes_on_where_it_was(tmp_path: Path) -> None:
    publisher = published(tmp_path, 0, 7, [AllBlocksCleared()], *(removed(number) for number in range(9)))
    for start, expected in ((4, [4, 5, 6]), (10, [10]), (50, [0, 1, 2])):  # the last one is an earlier scheduler's
        async with aclosing(Subscriptions(str(tmp_path)).stream(start)) as stream:
            reading = asyncio.create_task(numbers(stream, len(expected)))
            if start == 10:  # it knows all: only what comes now is new
                publisher.publish(removed(1))
            assert [number for _, number in await reading] == expected
    publisher.close()


async def test_a_scheduler_that_follows_another_is_heard_from_its_begin(tmp_path: Path) -> None:
    first = published(tmp_path, 0, 7, [AllBlocksCleared()], removed(1), removed(2))
    async with aclosing(Subscriptions(str(tmp_path)).stream(1)) as stream:
        assert await numbers(stream, 2) == [(0, 1), (0, 2)]
        second = published(tmp_path, 0, 8, [AllBlocksCleared()], removed(1))
        assert await numbers(stream, 2) == [(0, 0), (0, 1)]
        first.close()
        second.publish(removed(2))
        assert await numbers(stream, 1) == [(0, 2)]
        second.close()


async def test_the_server_ends_its_streams(tmp_path: Path) -> None:
    publisher = published(tmp_path, 0, 7, [AllBlocksCleared()])
    subscriptions = Subscriptions(str(tmp_path))
    async with aclosing(subscriptions.stream(0)) as stream, aclosing(subscriptions.stream(0)) as other:
        assert await numbers(stream, 1) == [(0, 0)]
        waiting = asyncio.create_task(numbers(other, 2))
        await asyncio.sleep(0)
        subscriptions.end()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises((StopAsyncIteration, RuntimeError)):
            await waiting
    async with aclosing(subscriptions.stream(0)) as late:
        with pytest.raises(StopAsyncIteration):
            await anext(late)
    publisher.close()


async def test_what_goes_wrong_ends_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = published(tmp_path, 0, 7, [AllBlocksCleared()])

    async def fails(*_: object) -> None:
        raise ValueError("it went wrong")

    monkeypatch.setattr(kv_events.Follower, "_fill", fails)
    async with aclosing(Subscriptions(str(tmp_path)).stream(0)) as stream:
        with pytest.raises(ValueError, match="it went wrong"):
            await anext(stream)
    publisher.close()


def test_messages() -> None:
    stored = BlockStored(
        [LARGE, 3], 9, [1, 2, 3, 4], 2, None, "GPU", None, [("salt", b"\1"), None], 1, "sliding_window", 64
    )
    events: list[KVEvent] = [stored, BlockRemoved([LARGE], "GPU", 1), AllBlocksCleared()]
    found = message_of(2**32 + 6, encode(KVEventBatch(2.5, events, 3), "map"))
    assert (found.sequence_number, found.timestamp, found.dp_rank) == (2**32 + 6, 2.5, 3)
    assert [event.event_id for event in found.events] == [6 << 32, 6 << 32 | 1, 6 << 32 | 2]
    assert [event.WhichOneof("data") for event in found.events] == ["stored", "removed", "cleared"]
    blocks = found.events[0].stored
    assert (blocks.parent_block_hash, blocks.tier, blocks.medium) == (9, common.KV_CACHE_TIER_DEVICE, "GPU")
    assert (blocks.group_idx, blocks.kv_cache_spec_kind, blocks.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        64,
    )
    assert [(one.block_hash, list(one.token_ids), one.block_size) for one in blocks.blocks] == [
        (-5, [1, 2], 2),
        (3, [3, 4], 2),
    ]
    assert [key.text or key.blob for key in blocks.blocks[0].extra_keys] == ["salt", b"\1"]
    assert not blocks.blocks[1].extra_keys
    gone = found.events[1].removed
    assert (list(gone.block_hashes), gone.group_idx, gone.cache_level, gone.HasField("cache_level")) == (
        [-5],
        1,
        0,
        True,
    )


def test_a_text_that_begins_has_no_parent() -> None:
    stored = BlockStored([1], None, [1, 2], 2, None, None, None)
    (event,) = message_of(0, encode(KVEventBatch(1.0, [stored]), "map")).events
    assert not event.stored.HasField("parent_block_hash")
    assert not event.stored.HasField("tier")
    assert not event.stored.blocks[0].HasField("cache_level")
