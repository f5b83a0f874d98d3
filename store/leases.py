"""Who reads and writes which keys: the leases of one scheduler. Pure; owned by core.py.

A lease holds its keys in use. It ends with EndLease or PagesStored. One that is void (its scheduler is lost, or began anew) holds them
until LEASE_S later, since the scheduler's workers may still copy for so long; what was written under it is dropped.
"""

from dataclasses import dataclass, field

from meshlm.protocol.edges.kv import NOT_HERE, PageMemory
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Identity, Incarnation
from meshlm.store.memory import Memory, Stored


@dataclass(slots=True)
class Lease:
    """The keys that a scheduler reads, or was asked to write: by key that it named, None for those that are not leased."""

    keys: list[Stored | None]
    widths: bytes
    writes: bool

    @property
    def is_empty(self) -> bool:
        return not any(self.keys)

    @property
    def held(self) -> list[Stored]:
        return [stored for stored in self.keys if stored is not None]

    def pages(self) -> bytes:
        """int32, as the answers have it."""
        columns = (
            stored.slots if stored is not None else [NOT_HERE] * width for stored, width in zip(self.keys, self.widths)
        )
        return pack_i32(page for column in columns for page in column)

    def end(self, memory: Memory, stored: bytes = b"") -> list[Stored]:
        """Nobody uses its keys any more. stored: by key of an offer, 1 for what is written. That is content now, and is given."""
        if not self.writes:
            for one in self.held:
                memory.leave(one)
            return []
        valid = stored if len(stored) == len(self.keys) else bytes(len(self.keys))
        asked = [(one, bool(flag)) for one, flag in zip(self.keys, valid) if one is not None]
        # The last first: what comes first is evicted first, and a block is of no use without those before it.
        for one, is_valid in reversed(asked):
            memory.written(one, is_valid=is_valid)
        return [one for one, is_valid in asked if is_valid]


@dataclass(slots=True)
class Question:
    """A FindPages that is not answered yet, as files are being read for it. Its lease is among the client's."""

    sender: Identity
    number: int
    lease: Lease
    until: float  # then it is answered without those that are not read
    missing: set[bytes]  # keys whose files are not read yet
    reads: frozenset[bytes]  # all whose files are read for it


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
