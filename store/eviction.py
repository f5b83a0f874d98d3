"""Which keys a full tier gives up: S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP
2023). Pure; both tiers have one.

A key comes into a small queue, which gives its oldest key up as soon as it has more than a tenth of what there is: so keys that nobody
asks for again pass through without touching the rest. One that was found meanwhile goes on into the main queue; and so does, at once,
one that comes again soon after it was given up (the ghost queue has its name). The main queue gives up its oldest key too, but one that
was found goes to its end, up to three times: this is LRU with frequency at the cost of FIFO, as a hit adds to one number and moves
nothing. In the paper one hit in the small queue is not enough. Here it is: the cache of the device has taken the quick repetitions.
"""

from collections import OrderedDict
from collections.abc import Callable

SMALL = 10  # the small queue has one part of so many
MOST_HITS = 3


class Eviction:
    """The keys of a tier, each with its size, in pages or bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._small_size = 0
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()  # as many names as there are keys
        self._hits: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: bytes) -> bool:
        return key in self._small or key in self._main

    def add(self, key: bytes, size: int) -> None:
        """A key that is not there."""
        self.size += size
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = size
        else:
            self._small[key] = size
            self._small_size += size

    def hit(self, key: bytes) -> None:
        """A key that is there was found."""
        self._hits[key] = min(MOST_HITS, self._hits.get(key, 0) + 1)

    def remove(self, key: bytes) -> None:
        """A key leaves, for whatever reason but that it was the next one."""
        self._hits.pop(key, None)
        if (size := self._small.pop(key, None)) is not None:
            self._small_size -= size
        else:
            size = self._main.pop(key)
        self.size -= size

    def evict(self, in_use: Callable[[bytes], bool]) -> bytes | None:
        """The key that leaves now. One in use does not: it goes on as if it had been found. None: all are in use."""
        for _ in range((MOST_HITS + 2) * len(self)):
            if self._main and self._small_size * SMALL <= self.size:
                key, size = self._main.popitem(last=False)
                if not self._stays(key, in_use):
                    self.size -= size
                    return key
            else:
                key, size = self._small.popitem(last=False)
                self._small_size -= size
                if not self._stays(key, in_use):
                    self.size -= size
                    self._ghost[key] = None
                    while len(self._ghost) > len(self):
                        self._ghost.popitem(last=False)
                    return key
            self._main[key] = size
        return None

    def _stays(self, key: bytes, in_use: Callable[[bytes], bool]) -> bool:
        hits = self._hits.pop(key, 0)
        if hits > 1:
            self._hits[key] = hits - 1
        return hits > 0 or in_use(key)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert not self._small.keys() & self._main.keys(), "in both queues"
        assert not self._ghost.keys() & (self._small.keys() | self._main.keys()), "there, and given up"
        assert self._hits.keys() <= self._small.keys() | self._main.keys(), "found, and not there"
        assert self._small_size == sum(self._small.values())
        assert self.size == self._small_size + sum(self._main.values())
