"""The pool of KV blocks: who uses which, which may be reused, which hold a known prefix.

A block is *used* (reference count > 0) or *free*. Free blocks stand in a list from least to most recently used and may still
hold a prefix: a hit takes such a block out of the list again, an allocation takes the oldest and forgets its hash only
then (lazy eviction). Pure; owned by core.py.
"""

from array import array
from collections.abc import Iterable, Sequence

from meshlm.protocol.ids import BlockId

_NONE = -1


class NoFreeBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was allocated."""


class BlockPool:
    """All operations are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self._changes: dict[BlockId, bytes | None] = {}  # of _hash, since they were taken
        # A circular doubly linked list with a sentinel at index num_blocks.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[BlockId]:
        """`count` blocks with one reference each, least recently used first. NoFreeBlocks."""
        if count > self.num_free:
            raise NoFreeBlocks
        end, after, before = self.num_blocks, self._next, self._previous
        blocks = []
        block = after[end]
        for _ in range(count):
            known = self._hash[block]
            if known is not None:
                del self._by_hash[known]
                self._hash[block] = self._changes[BlockId(block)] = None
            self._references[block] = 1
            blocks.append(BlockId(block))
            following = after[block]
            after[block] = before[block] = _NONE
            block = following
        after[end], before[block] = block, end
        self.num_free -= count
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each; blocks of a prefix found in the cache."""
        for block in blocks:
            if self._references[block] == 0:
                self._unlink(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each, last block first: a prefix outlives its continuations."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._link(block, oldest=self._hash[block] is None)

    def find(self, block_hash: bytes) -> BlockId | None:
        """The block that holds this prefix."""
        return self._by_hash.get(block_hash)

    def remember(self, block: BlockId, block_hash: bytes) -> None:
        """This full block holds this prefix. A second block with the same content stays unknown."""
        if block_hash not in self._by_hash and self._hash[block] is None:
            self._by_hash[block_hash] = block
            self._hash[block] = self._changes[block] = block_hash

    def restore(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """These free blocks hold these prefixes; the last ones are reused last."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if 0 <= block < self.num_blocks and self._references[block] == 0:
                self._unlink(block)
                self.remember(BlockId(block), block_hash)
                self._link(block, oldest=False)

    def take_changes(self) -> tuple[bytes, bytes, bytes]:
        """Since the last call: int32 of blocks that hold no known prefix any more, of those that do, and their hashes."""
        if not self._changes:
            return b"", b"", b""
        changes, self._changes = self._changes, {}
        forgotten = array("i", [block for block, known in changes.items() if known is None])
        remembered = array("i", [block for block, known in changes.items() if known is not None])
        return forgotten.tobytes(), remembered.tobytes(), b"".join(known for known in changes.values() if known)

    def forget_all(self) -> None:
        """No block's content can be trusted any more."""
        self._changes |= dict.fromkeys(self._by_hash.values())
        self._by_hash.clear()
        self._hash = [None] * self.num_blocks

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = _NONE
        self.num_free -= 1

    def _link(self, block: int, *, oldest: bool) -> None:
        """Put a free block at the end that is reused first (oldest) or last."""
        end = self.num_blocks
        before, after = (end, self._next[end]) if oldest else (self._previous[end], end)
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """AssertionError unless `tables` hold exactly the references there are, and free + used = all."""
        counted = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), "a table holds a block twice"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "references differ from the tables"
        free, at = 0, self._next[self.num_blocks]
        while at != self.num_blocks:
            assert self._references[at] == 0, "a used block is in the free list"
            free, at = free + 1, self._next[at]
        assert free == self.num_free == counted.count(0), "free + used is not all"
        for known, block in self._by_hash.items():
            assert self._hash[block] == known, "hash tables disagree"
