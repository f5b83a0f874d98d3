"""The first tier: keys and the slots of host memory that have their pages. Pure; owned by core.py, which alone knows leases.

A slot holds one page of all workers of a rank, side by side; all slots have one size at a time. A key has as many slots as pages, which
come and go together. What may be done with them is its state's to say:

    WRITING -> STORED     a scheduler's workers, or the second tier's reader, have written them
    WRITING -> gone       they have not, or failed
    STORED  -> gone       it was evicted, or its room is needed for pages of another size

A key in use (num_uses) keeps its slots: somebody reads or writes them. Nothing but a key that is STORED and not in use is ever evicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from meshlm.protocol.edges.kv import PageMemory, Segment
from meshlm.runtime.process.counts import Counts
from meshlm.store.eviction import Eviction


class State(Enum):
    WRITING = "writing"
    STORED = "stored"


@dataclass(slots=True)
class Stored:
    """A key in the memory."""

    key: bytes  # with its namespace
    slots: tuple[int, ...]
    state: State = State.WRITING
    num_uses: int = 1


def num_pages(keys: Iterable[Stored]) -> int:
    """Pages of all of them."""
    return sum(len(stored.slots) for stored in keys)


class Memory:
    """`num_bytes` in all. Slots have no size before a rank has said what its pages are."""

    def __init__(self, num_bytes: int, counts: Counts) -> None:
        self.num_bytes, self.slot_bytes, self._counts = num_bytes, 0, counts
        self.keys: dict[bytes, Stored] = {}
        self._num_in_use = 0  # slots
        self._num_slots = 0
        self._free: list[int] = []  # slots that have been used
        self._fresh = 0  # those from here on have not: the kernel has given no memory for them
        self._eviction = Eviction()

    @property
    def in_use(self) -> bool:
        return self._num_in_use > 0

    def divide(self, slot_bytes: int) -> None:
        """Slots of this size from now on: the content is dropped, of which nothing is in use."""
        assert not self.in_use
        self.slot_bytes, self._num_slots = slot_bytes, self.num_bytes // slot_bytes
        self.keys, self._eviction = {}, Eviction()
        self._free, self._fresh = [], 0

    def segments(self, page_bytes: Sequence[int], path: str) -> tuple[PageMemory, ...]:
        """The part of each slot that is each worker's, whose pages have so many bytes."""
        offsets = (sum(page_bytes[:worker]) for worker in range(len(page_bytes)))
        parts = (Segment(offset, self.slot_bytes, length) for offset, length in zip(offsets, page_bytes))
        return tuple(PageMemory(path, self._num_slots, (part,)) for part in parts)

    def find(self, key: bytes, width: int) -> Stored | None:
        """The key with that many pages, WRITING or STORED."""
        found = self.keys.get(key)
        return found if found is not None and len(found.slots) == width else None

    def reserve(self, key: bytes, width: int) -> Stored | None:
        """Slots for a key that is not there, in use by who will write them. None: there is no room."""
        if not 0 < width <= self._num_slots - self._num_in_use:
            return None
        while self._num_free < width:
            if (given_up := self._eviction.evict(self._is_in_use)) is None:
                return None
            self._free += self.keys.pop(given_up).slots
            self._counts.add("kv_store_evicted", "memory")
        self.keys[key] = stored = Stored(key, tuple(self._take() for _ in range(width)))
        self._num_in_use += width
        return stored

    @property
    def _num_free(self) -> int:
        return len(self._free) + self._num_slots - self._fresh

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._fresh += 1
        return self._fresh - 1

    def written(self, stored: Stored, *, is_valid: bool) -> None:
        """The end of WRITING, and of its writer's use."""
        if is_valid:
            stored.state = State.STORED
            self._eviction.add(stored.key, len(stored.slots))
        self.leave(stored)
        if not is_valid:
            assert not stored.num_uses, "somebody reads what was never written"
            del self.keys[stored.key]
            self._free += stored.slots

    def hit(self, stored: Stored) -> None:
        """Somebody found it and uses it now."""
        self._eviction.hit(stored.key)
        self.use(stored)

    def use(self, stored: Stored) -> None:
        """It is used once more. Of a key that is STORED."""
        if not stored.num_uses:
            self._num_in_use += len(stored.slots)
        stored.num_uses += 1

    def leave(self, stored: Stored) -> None:
        stored.num_uses -= 1
        if not stored.num_uses:
            self._num_in_use -= len(stored.slots)

    def _is_in_use(self, key: bytes) -> bool:
        return self.keys[key].num_uses > 0

    @property
    def stored_bytes(self) -> int:
        return (self._num_slots - self._num_free) * self.slot_bytes

    def pages(self) -> dict[str, int]:
        """Slots by state, as /metrics has them."""
        return {
            "in_use": self._num_in_use,
            "stored": self._num_slots - self._num_in_use - self._num_free,
            "free": self._num_free,
        }

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        slots = [*self._free, *(slot for stored in self.keys.values() for slot in stored.slots)]
        assert sorted(slots) == list(range(self._fresh)), "a slot has two owners, or none"
        assert self._fresh <= self._num_slots
        for key, stored in self.keys.items():
            assert stored.key == key
            assert stored.num_uses >= (stored.state is State.WRITING)
            assert (key in self._eviction) == (stored.state is State.STORED)
        assert self._num_in_use == num_pages(stored for stored in self.keys.values() if stored.num_uses)
        assert self.num_bytes >= self._num_slots * self.slot_bytes
        assert len(self._eviction) <= len(self.keys)
        self._eviction.check()
