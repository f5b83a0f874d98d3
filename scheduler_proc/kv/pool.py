"""The pool of KV pages: who uses which, which may be reused, which hold a known prefix.

A page is *used* (reference count > 0) or *free*. Block tables and leases are references: a lease keeps pages that a load fills, or
that others read, from being freed, evicted or given away. A free page may still hold a prefix: a hit takes it back. An allocation
takes pages that hold none first, then the least recently used, whose key is dropped only then (lazy eviction). What is cached under one
key is the pages of all groups of equal spec at one place of their tables: they are used and freed together, and the first of them that
is given away takes the key with it. Pure; owned by cache.py.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from meshlm.protocol.wire.ids import BlockId
from meshlm.scheduler_proc.kv.events import CacheEvents
from meshlm.scheduler_proc.kv.lease import Lease
from meshlm.scheduler_proc.kv.residency import Residency


class NoFreeBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was allocated."""


MAX_GHOSTS = 1 << 16  # keys of evicted pages that are kept, to know why a prefix is not found


class BlockPool:
    """All operations are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, Sequence[BlockId]] = {}
        self.leases: set[Lease] = set()
        self.num_resets = 0  # of the prefix cache
        self.residency: Residency | None = None  # with --kv-cache-metrics
        self.events: CacheEvents | None = None  # with --kv-events-config
        self._ghosts: dict[bytes, None] = {}  # keys that were evicted, the newest last
        # The pages that are cached under a key, or None; a hundred times for each request that starts.
        self.find = self._cached.get
        # Changes of _key since they were taken: pages that have one, those of one key side by side, and pages that have none any more.
        self._remembered: dict[BlockId, bytes] = {}
        self._forgotten: dict[BlockId, None] = {}
        # Free pages without a prefix, the last one goes first; and those with one, the least recently used goes first.
        self._fresh = [BlockId(block) for block in reversed(range(num_blocks))]
        self._reusable: OrderedDict[BlockId, None] = OrderedDict()

    def allocate(self, count: int) -> list[BlockId]:
        """`count` blocks with one reference each, least recently used first. NoFreeBlocks."""
        if count > self.num_free:
            raise NoFreeBlocks
        fresh, references = self._fresh, self._references
        blocks = [fresh.pop() if fresh else self._oldest() for _ in range(count)]
        for block in blocks:
            references[block] = 1
        self.num_free -= count
        if self.residency is not None:
            self.residency.allocated(blocks)
        return blocks

    def _oldest(self) -> BlockId:
        """Take the page that was not used for longest from those with a prefix. Others of its key become fresh."""
        block = next(iter(self._reusable))
        known = self._key[block]
        assert known is not None
        self._evict(known)
        return self._fresh.pop()

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each; blocks of a prefix found in the cache."""
        if self.residency is not None:
            self.residency.touched(blocks := list(blocks))
        for block in blocks:
            if self._references[block] == 0:
                del self._reusable[block]
                self.num_free -= 1
            self._references[block] += 1

    def free(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each, last block first: a prefix outlives its continuations."""
        references, keys = self._references, self._key
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                self.num_free += 1
                if keys[block] is None:
                    self._fresh.append(block)
                else:
                    self._reusable[block] = None

    def lease(self, blocks: Iterable[BlockId]) -> Lease:
        """Keeps these pages, which are cached or in use, as they are. All pages of a key are leased together."""
        lease = Lease(list(blocks))
        self.touch(lease.pages)
        self.leases.add(lease)
        return lease

    def lease_new(self, count: int) -> Lease:
        """Allocates `count` pages for a load to fill. NoFreeBlocks."""
        lease = Lease(self.allocate(count))
        self.leases.add(lease)
        return lease

    def end_lease(self, lease: Lease) -> None:
        """Nobody reads or writes these pages from outside any more."""
        self.leases.remove(lease)
        self.free(lease.pages)

    def holds_since_told(self, blocks: Iterable[BlockId]) -> bool:
        """Whether what these cached pages hold is what they held at the last take_changes()."""
        return self._remembered.keys().isdisjoint(blocks)

    def cache_block(self, key: bytes, blocks: Sequence[BlockId]) -> None:
        """These full pages hold this prefix. Others with the same content stay unknown."""
        if key not in self._cached and self._key[blocks[0]] is None:
            self._cached[key] = blocks
            if self._ghosts:
                self._ghosts.pop(key, None)
            for block in blocks:
                self._key[block] = self._remembered[block] = key
                if self._forgotten:
                    self._forgotten.pop(block, None)

    def forget(self, key: bytes) -> Sequence[BlockId]:
        """What is cached under this key is not what the key says: nobody finds it any more. Gives its pages."""
        pages = self._cached.get(key, ())
        if pages:
            self._evict(key)
        return pages

    def num_evicted(self, keys: Iterable[bytes]) -> int:
        """The number of these keys that were known, and whose pages were needed for others."""
        return sum(map(self._ghosts.__contains__, keys))

    def states(self) -> dict[str, float]:
        return {"used": self.num_blocks - self.num_free, "cached": len(self._reusable), "empty": len(self._fresh)}

    def _evict(self, key: bytes) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > MAX_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        if self.events is not None:
            self.events.removed(key)
        for block in self._cached.pop(key):
            self._key[block] = self._forgotten[block] = None
            if self.residency is not None:
                self.residency.evicted(block)
            self._remembered.pop(block, None)
            if self._references[block] == 0:
                del self._reusable[block]
                self._fresh.append(block)

    def restore(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """These free pages hold these prefixes, pages of one key side by side; the last ones are reused last."""
        for key, pairs in groupby(zip(keys, blocks, strict=True), itemgetter(0)):
            pages = [BlockId(block) for _, block in pairs]
            if all(0 <= page < self.num_blocks and self._references[page] == 0 for page in pages):
                self.cache_block(key, pages)
        self._reusable.update((page, None) for page in self._remembered if self._references[page] == 0)
        self._fresh = [page for page in self._fresh if self._key[page] is None]

    def has_untold(self) -> bool:
        """Whether those who follow the events do not know of all prefixes that are here."""
        return self.events is not None and len(self.events.told) < len(self._cached)

    def tell_inherited(self) -> None:
        """To be called when a session begins, after `restore`: those who follow the events forget what is no longer there."""
        if self.events is not None:
            self.events.inherited(self._cached)

    def take_changes(self) -> tuple[bytes, bytes, bytes]:
        """Since the last call: int32 of pages that hold no known prefix any more, of those that do, and their keys."""
        remembered, forgotten = self._remembered, self._forgotten
        if not (remembered or forgotten):
            return b"", b"", b""
        self._remembered, self._forgotten = {}, {}
        return array("i", forgotten).tobytes(), array("i", remembered).tobytes(), b"".join(remembered.values())

    def reset_prefix_cache(self) -> None:
        """No page's content can be trusted any more."""
        if self.residency is not None:
            self.residency.forget()
        self.num_resets += 1
        for key in list(self._cached):
            self._evict(key)
        if self.events is not None:
            self.events.cleared()
        self._ghosts.clear()

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """AssertionError unless `tables` and the leases hold exactly the references there are, and free + used = all."""
        counted = [0] * self.num_blocks
        for table in (*tables, *(lease.pages for lease in self.leases)):
            assert len(set(table)) == len(table), "a table holds a block twice"
            for block in table:
                counted[block] += 1
        assert counted == self._references, "references differ from the tables"
        free = {*self._fresh, *self._reusable}
        assert not any(counted[block] for block in free), "a used block is free"
        assert all(self._key[block] is None for block in self._fresh), "a page without a prefix holds one"
        assert all(self._key[block] is not None for block in self._reusable), "a page with a prefix holds none"
        assert len(free) == self.num_free == counted.count(0), "free + used is not all"
        cached: list[bytes | None] = [None] * self.num_blocks
        for key, blocks in self._cached.items():
            assert {self._key[block] for block in blocks} == {key}, "a page does not know its key"
            assert len({self._references[block] for block in blocks}) == 1, "pages of one key are used apart"
            for block in blocks:
                cached[block] = key
        assert cached == self._key, "a page has a key that finds others"
        assert self.events is None or self.events.told.keys() <= self._cached.keys(), "others were told of what is gone"
