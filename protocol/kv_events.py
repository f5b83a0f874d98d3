"""Events of a rank's prefix cache as vLLM publishes them: routers learn from them which blocks a rank has.

Schedulers publish them, frontends give them out over gRPC, routers of others read them. Names and
order of the fields are vLLM's. A batch is an array. Its events are maps, as in vLLM since June 2026 ("map"), or arrays that begin with
the event's name, as before ("array").
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

Encoding = Literal["map", "array"]
SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES  # the number behind the last batch of a replay
DEVICE = "GPU"  # the medium of pages on the device, whichever it is
_LOW_64_BITS = (1 << 64) - 1


class BlockStored(Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other are in the cache now. A list has an entry per block, but token_ids has block_size of them."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first of these; None: they begin a text
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # what beside its tokens decides a block
    group_idx: int | None = None  # a block is stored and removed in each group of layers by itself
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Struct, tag=True, omit_defaults=True):
    """Blocks are no longer there: their memory was needed."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Struct, tag=True):
    """No block is there any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(Struct, array_like=True):
    """The events of one turn of a scheduler, in order."""

    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int | None = None


_NAMES = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_decode = msgspec.msgpack.Decoder(tuple[float, list[Any], int | None]).decode
_encode = msgspec.msgpack.Encoder().encode


def encode(batch: KVEventBatch, encoding: Encoding) -> bytes:
    """The batch as it goes over the wire."""
    if encoding == "map":
        return _encode(batch)
    events = [(type(event).__name__, *msgspec.structs.astuple(event)) for event in batch.events]
    return _encode((batch.ts, events, batch.data_parallel_rank))


def decode(payload: bytes) -> KVEventBatch:
    """The batch, in either encoding."""
    ts, events, rank = _decode(payload)
    found = [_NAMES[one[0]](*one[1:]) if isinstance(one, list) else msgspec.convert(one, KVEvent) for one in events]
    return KVEventBatch(ts, found, rank)


def hash_of(block_hash: bytes) -> int:
    """A block's hash as events name it: the last 8 of its 32 bytes, a number without a sign, as vLLM's default is."""
    return int.from_bytes(block_hash, "big") & _LOW_64_BITS


def address_of_rank(address: str, rank: int) -> str:
    """Where this rank publishes: at a port that is higher by its number, as in vLLM; a path has the number behind it."""
    if not address or not rank:
        return address
    if not address.startswith("tcp://"):
        return f"{address}_dp{rank}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


def is_bound(address: str) -> bool:
    """Whether the publisher listens there, much as vLLM decides it; else it connects to one subscriber who does."""
    return "*" in address or "::" in address or address.startswith(("ipc://", "tcp://0.0.0.0:"))


class LocalSockets(Struct, frozen=True):
    """Where the frontends of a node hear one scheduler: its batches, and replays."""

    pub: str
    replay: str

    @classmethod
    def of(cls, run_dir: str, index: int, incarnation: int) -> "LocalSockets":
        path = f"ipc://{run_dir}/kv-events-{index}-{incarnation}"
        return cls(f"{path}.sock", f"{path}-replay.sock")

    @staticmethod
    def pattern(index: int | None = None) -> str:
        """Of the names of all that this scheduler had, or any."""
        return f"kv-events-{'*' if index is None else index}-*.sock"
