"""A subscriber to the events of a prefix cache, without sockets."""

from typing import Any

from meshlm.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

Block = tuple[int, int | None]  # its hash and its group


class Subscriber:
    """`known`: of each block its parent, its tokens and what else decides it."""

    def __init__(self) -> None:
        self.known: dict[Block, tuple[Any, ...]] = {}

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    assert event.extra_keys is not None
                    parent = event.parent_block_hash
                    for at, (name, extra) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
                        assert (name, event.group_idx) not in self.known, "it was told of that block before"
                        tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                        self.known[name, event.group_idx] = (parent, tokens, extra)
                        parent = name
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.known[name, event.group_idx]
                case AllBlocksCleared():
                    self.known.clear()
