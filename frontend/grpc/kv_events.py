"""SubscribeKvEvents: the events of the prefix caches of this node's ranks, as messages of gRPC.

Each scheduler publishes in the run directory, at sockets that are named after its incarnation (protocol/kv_events.py). A stream looks
for them from time to time: a new one is a new scheduler, whose numbers begin anew. Owned by servicer.py.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import zmq
import zmq.asyncio
from smg_grpc_proto.generated import common_pb2 as common

from meshlm.protocol.kv_events import (
    DEVICE,
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    LocalSockets,
    decode,
)

LOOK_S = 0.2  # how often new schedulers are looked for
REPLAY_S = 5.0  # without a word, after which a replay is given up
MAX_AHEAD = 64  # batches of a stream that its client has not read
MAX_STREAMS = 32  # of a frontend
_DEVICE_LEVEL = 0  # of a block, to older clients
_SIGN, _LOW_32_BITS = 1 << 63, (1 << 32) - 1
Numbered = tuple[int, bytes]


class Follower:
    """One scheduler, whose batches go to a queue: those that it still has, and then each new one."""

    def __init__(self, sockets: LocalSockets, batches: "asyncio.Queue[Numbered]") -> None:
        self._sockets, self._batches = sockets, batches
        self._next = 0

    async def follow(self, context: zmq.asyncio.Context, start: int) -> None:
        """Until cancelled, from number `start` on. One beyond what this scheduler has said is of an earlier one: then from 0 on."""
        with context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as self._replay:
            for socket, address in ((sub, self._sockets.pub), (self._replay, self._sockets.replay)):
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(address)
            sub.subscribe(b"")
            if start and await self._ask(start - 1):  # the last one that the client knows, and those behind it
                self._next = start
            await self._fill()
            while True:
                _, number, payload = await sub.recv_multipart()
                if (at := int.from_bytes(number, "big")) > self._next:
                    await self._fill()
                if at >= self._next:
                    await self._give(at, payload)

    async def _fill(self) -> None:
        for number, payload in await self._ask(self._next):
            if number >= self._next:
                await self._give(number, payload)

    async def _give(self, number: int, payload: bytes) -> None:
        await self._batches.put((number, payload))
        self._next = number + 1

    async def _ask(self, start: int) -> list[Numbered]:
        """The batches from there on that the scheduler still has; those that came when it says nothing any more."""
        await self._replay.send_multipart((b"", start.to_bytes(SEQUENCE_BYTES, "big")))
        found: list[Numbered] = []
        with contextlib.suppress(TimeoutError):
            while True:
                _, number, payload = await asyncio.wait_for(self._replay.recv_multipart(), REPLAY_S)
                if number == END_OF_REPLAY:
                    break
                found.append((int.from_bytes(number, "big"), payload))
        return found


class Subscriptions:
    """The open streams. `end` ends them: they would have no end otherwise."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._ended = asyncio.Event()
        self.num_open = 0

    def end(self) -> None:
        self._ended.set()

    async def stream(self, start: int) -> AsyncGenerator[common.KvEventBatch, None]:
        """The batches of all ranks of this node, of each from number `start` on, until `end` is called."""
        batches: asyncio.Queue[Numbered] = asyncio.Queue(MAX_AHEAD)
        following = asyncio.create_task(self._follow_all(start, batches))
        ended = asyncio.create_task(self._ended.wait())
        self.num_open += 1
        try:
            while not self._ended.is_set():
                batch = asyncio.create_task(batches.get())
                await asyncio.wait((batch, ended, following), return_when=asyncio.FIRST_COMPLETED)
                if not batch.done():
                    batch.cancel()
                    break
                yield message_of(*batch.result())
            if following.done():
                following.result()  # what went wrong
        finally:
            self.num_open -= 1
            ended.cancel()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow_all(self, start: int, batches: "asyncio.Queue[Numbered]") -> None:
        context, tasks = zmq.asyncio.Context(), dict[str, asyncio.Task[None]]()
        try:
            while True:
                here = await asyncio.to_thread(self._find)
                for gone in tasks.keys() - here.keys():
                    tasks.pop(gone).cancel()
                for name in here.keys() - tasks.keys():
                    follower = Follower(here[name], batches)
                    tasks[name] = asyncio.create_task(follower.follow(context, start))
                start = 0  # of schedulers that come later
                if tasks:
                    await asyncio.wait(tasks.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(LOOK_S)
                for task in tasks.values():
                    if task.done():
                        task.result()  # one that ends has failed
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            context.term()

    def _find(self) -> dict[str, LocalSockets]:
        """The sockets of the schedulers that are there, by name."""
        found = (path.stem.removeprefix("kv-events-") for path in self._run_dir.glob(LocalSockets.pattern()))
        places = [name.split("-") for name in found if not name.endswith("-replay")]
        return {f"{index}-{life}": LocalSockets.of(str(self._run_dir), int(index), int(life)) for index, life in places}


def message_of(number: int, payload: bytes) -> common.KvEventBatch:
    """A batch as gRPC has it."""
    batch = decode(payload)
    events = [event_of(event, (number & _LOW_32_BITS) << 32 | at) for at, event in enumerate(batch.events)]
    return common.KvEventBatch(
        sequence_number=number, timestamp=batch.ts, events=events, dp_rank=batch.data_parallel_rank
    )


def event_of(event: KVEvent, event_id: int) -> common.KvCacheEvent:
    match event:
        case BlockStored():
            return common.KvCacheEvent(event_id=event_id, stored=_stored(event))
        case BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group):
            tier, level = _place(medium)
            removed = common.KvBlocksRemoved(
                block_hashes=map(_signed, hashes), cache_level=level, tier=tier, medium=medium, group_idx=group
            )
            return common.KvCacheEvent(event_id=event_id, removed=removed)
        case AllBlocksCleared():
            return common.KvCacheEvent(event_id=event_id, cleared=common.KvCacheCleared())


def _stored(event: BlockStored) -> common.KvBlocksStored:
    size, (tier, level) = event.block_size, _place(event.medium)
    extra_keys = event.extra_keys or [None] * len(event.block_hashes)
    blocks = [
        common.KvBlock(
            block_hash=_signed(name),
            token_ids=event.token_ids[at * size : (at + 1) * size],
            block_size=size,
            cache_level=level,
            extra_keys=[_extra_key(one) for one in extra or ()],
        )
        for at, (name, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True))
    ]
    parent = event.parent_block_hash
    return common.KvBlocksStored(
        blocks=blocks,
        parent_block_hash=None if parent is None else _signed(parent),
        tier=tier,
        medium=event.medium,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
    )


def _place(medium: str | None) -> tuple[int | None, int | None]:
    """The tier, and its number to older clients, where they have one."""
    return (common.KV_CACHE_TIER_DEVICE, _DEVICE_LEVEL) if medium == DEVICE else (None, None)


def _extra_key(value: str | bytes) -> common.KvBlockExtraKey:
    is_text = isinstance(value, str)
    return common.KvBlockExtraKey(text=value) if is_text else common.KvBlockExtraKey(blob=value)


def _signed(number: int) -> int:
    """The same 64 bits with a sign."""
    return (number ^ _SIGN) - _SIGN
