"""Who reads and writes which keys: the leases of one scheduler. Pure; owned by core.py.

A lease holds its keys in use. It ends with EndLease or PagesStored. One that is void (its scheduler is lost, or began anew) holds them
until LEASE_S later, since the scheduler's workers may still copy for so long; what was written under it is dropped.
"""

from dataclasses import dataclass, field

from meshlm.protocol.edges.kv import PageMemory
from meshlm.protocol.wire.ids import Incarnation
from meshlm.store.memory import Memory, Stored


@dataclass(slots=True)
class Lease:
    """The keys that a scheduler reads, or was asked to write: of an offer by key, None for those that were not wanted."""

    reads: list[Stored] = field(default_factory=list)
    writes: list[Stored | None] = field(default_factory=list)

    def end(self, memory: Memory, stored: bytes = b"") -> list[Stored]:
        """Nobody uses its keys any more. stored: by key of an offer, 1 for what is written. That is content now, and is given."""
        for one in self.reads:
            memory.leave(one)
        valid = stored if len(stored) == len(self.writes) else bytes(len(self.writes))
        asked = [(one, bool(flag)) for one, flag in zip(self.writes, valid) if one is not None]
        # The last first: what comes first is evicted first, and a block is of no use without those before it.
        for one, is_valid in reversed(asked):
            memory.written(one, is_valid=is_valid)
        return [one for one, is_valid in asked if is_valid]


@dataclass(slots=True)
class Client:
    """A scheduler that has said what its pages are."""

    incarnation: Incarnation
    page_bytes: tuple[int, ...]
    memory: tuple[PageMemory, ...]
    last_number: int = 0  # of FindPages and OfferPages: they grow, so that one that comes late or twice is seen
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def slot_bytes(self) -> int:
        return sum(self.page_bytes)
