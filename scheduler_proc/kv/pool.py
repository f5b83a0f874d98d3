"""The pool of KV pages: who uses which, which may be reused, which hold a known prefix.

A page is *used* (reference count > 0) or *free*. Free pages stand in a list from least to most recently used and may still
hold a prefix: a hit takes such a page out of the list again, an allocation takes the oldest and drops its hash only
then (lazy eviction). What is cached under one key is the pages of all groups of equal spec at one place of their tables: they are
used and freed together, and the first of them that is given away takes the key with it. Pure; owned by cache.py.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

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
        self._key: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, Sequence[BlockId]] = {}
        self.find = (
            self._cached.get
        )  # the pages that are cached under a key, or None; a hundred times for each request that starts
        self._changes: dict[BlockId, bytes | None] = {}  # of _key, since they were taken
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
            known = self._key[block]
            if known is not None:
                self._evict(known)
            self._references[block] = 1
            blocks.append(BlockId(block))
            following = after[block]
            after[block] = before[block] = _NONE
            block = following
        after[end], before[block] = block, end
        self.num_free -= count
        return blocks

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each; blocks of a prefix found in the cache."""
        for block in blocks:
            if self._references[block] == 0:
                self._unlink(block)
            self._references[block] += 1

    def free(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each, last block first: a prefix outlives its continuations."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._link(block, oldest=self._key[block] is None)

    def cache_block(self, key: bytes, blocks: Sequence[BlockId]) -> None:
        """These full pages hold this prefix. Others with the same content stay unknown."""
        if key not in self._cached and self._key[blocks[0]] is None:
            self._cached[key] = blocks
            for block in blocks:
                self._key[block] = key
                self._changes.pop(block, None)  # pages of one key are told side by side
                self._changes[block] = key

    def _evict(self, key: bytes) -> None:
        for block in self._cached.pop(key):
            self._key[block] = self._changes[block] = None

    def restore(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """These free pages hold these prefixes, pages of one key side by side; the last ones are reused last."""
        for key, pairs in groupby(zip(keys, blocks, strict=True), itemgetter(0)):
            pages = [BlockId(block) for _, block in pairs]
            if all(0 <= page < self.num_blocks and self._references[page] == 0 for page in pages):
                for page in pages:
                    self._unlink(page)
                self.cache_block(key, pages)
                for page in pages:
                    self._link(page, oldest=False)

    def take_changes(self) -> tuple[bytes, bytes, bytes]:
        """Since the last call: int32 of pages that hold no known prefix any more, of those that do, and their keys."""
        if not self._changes:
            return b"", b"", b""
        changes, self._changes = self._changes, {}
        forgotten = array("i", [block for block, known in changes.items() if known is None])
        remembered = array("i", [block for block, known in changes.items() if known is not None])
        return forgotten.tobytes(), remembered.tobytes(), b"".join(known for known in changes.values() if known)

    def reset_prefix_cache(self) -> None:
        """No page's content can be trusted any more."""
        for key in list(self._cached):
            self._evict(key)

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
        cached: list[bytes | None] = [None] * self.num_blocks
        for key, blocks in self._cached.items():
            assert {self._key[block] for block in blocks} == {key}, "a page does not know its key"
            assert len({self._references[block] for block in blocks}) == 1, "pages of one key are used apart"
            for block in blocks:
                cached[block] = key
        assert cached == self._key, "a page has a key that finds others"
