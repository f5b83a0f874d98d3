"""What loads, saves and leases share: the workers' pages in one session, and what is to be sent. Pure; made by transfers.py."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from meshlm.protocol.edges.kv import LEASE_S, PageMemory
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.events import Send
from meshlm.scheduler_proc.batching import Batching
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.kv.pool import BlockPool

LEASE_NS = int(LEASE_S * 1e9)
STORE = Identity(Role.STORE)


@dataclass(slots=True, eq=False)
class PageSession:
    """One session with workers whose pages may move. Leases, loads and saves end with it."""

    number: int
    workers: list[Identity]
    namespace: bytes
    page_bytes: tuple[int, ...]  # by worker
    memory: tuple[PageMemory, ...]  # where others may read their pages, by worker; empty: nowhere
    batching: Batching
    numbers: Iterator[int]  # of leases, offers and moves, in this incarnation of the scheduler
    peers: set[Identity]  # holders that can be reached
    page_servers: tuple[tuple[str, int], ...] = ()  # where other meshes may read them, by worker; empty: nowhere
    sends: list[Send] = field(default_factory=list)
    store: tuple[PageMemory, ...] = ()  # its memory, by worker; empty: it keeps none of these pages

    @property
    def kv(self) -> KVCache:
        """The KV cache of the rank."""
        return self.batching.kv

    @property
    def pool(self) -> BlockPool:
        """Its pages."""
        return self.batching.kv.pool

    @property
    def counts(self) -> Counts:
        """For /metrics."""
        return self.batching.counts

    def send(self, to: Identity, message: Struct) -> None:
        """With all else of this event."""
        self.sends.append(Send(to, message))
