"""The store's pure core: which keys it has, where their pages lie, and who reads or writes them (docs/moved-kv.md).

`handle(event, now)` gets messages of schedulers and their deaths, and answers with messages to send. Called by io.py.

A scheduler opens its pages (OpenPages) and is a client from then on. FindPages leases what is there, OfferPages leases room for what is
wanted. All slots have the size that the clients' pages have; a rank with another size waits for the last lease of those, once the last
client that has them is gone, and then the content is dropped.
"""

from collections.abc import Iterator

from meshlm.protocol.counts import STORE, ProcessCounts
from meshlm.protocol.edges import kv
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Identity, Incarnation
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick
from meshlm.store.admission import Admission
from meshlm.store.ceiling import Ceiling
from meshlm.store.leases import Client, Lease
from meshlm.store.memory import Memory, State, Stored, num_pages

Event = Received | PeerLost | Tick


class Store:
    """`path`: the memory, as its readers open it."""

    def __init__(self, num_bytes: int, path: str, admission: Admission | None = None) -> None:
        self.counts = Counts(STORE)
        self.memory, self._path = Memory(num_bytes, self.counts), path
        self._admission, self._ceiling = admission or Admission(), Ceiling()
        self.clients: dict[Identity, Client] = {}
        self._void: list[tuple[float, Lease]] = []  # each with the moment at which it ends
        self._waiting: dict[
            Identity, tuple[Incarnation, kv.OpenPages]
        ] = {}  # for the last lease of pages of another size

    def handle(self, event: Event, now: float) -> list[Send]:
        match event:
            case Received():
                return self._received(event, now)
            case PeerLost():
                client = self.clients.get(event.identity)
                if client is not None and client.incarnation == event.incarnation:
                    self._forget(event.identity, now)
                self._waiting.pop(event.identity, None)
                return self._open_waiting()
            case Tick():
                self._end_void(now)
                return self._open_waiting()

    def _received(self, event: Received, now: float) -> list[Send]:
        sender, message = event.sender, event.message
        if isinstance(message, kv.OpenPages):
            self._forget(sender, now)
            self._waiting[sender] = event.incarnation, message
            return self._open_waiting()
        client = self.clients.get(sender)
        if client is not None and client.incarnation != event.incarnation:
            self._forget(sender, now)
            client = None
        match message:
            case kv.FindPages():
                return [Send(sender, self._find(client, message))]
            case kv.OfferPages():
                return [Send(sender, self._offered(client, message))]
            case kv.PagesStored():
                if client is not None and (lease := client.leases.pop(message.number, None)) is not None:
                    self._written(client, lease.end(self.memory, message.stored))
            case kv.EndLease():
                lease = client.leases.pop(message.number, None) if client is not None else None
                if client is not None and lease is not None:
                    self._read(client, lease)
                return [Send(sender, kv.LeaseEnded(message.number, lease is not None))]
        return []

    # --- clients ---

    def _open_waiting(self) -> list[Send]:
        """Answers the ranks that have opened their pages, as far as that can be said by now."""
        sends = []
        for identity, (incarnation, opened) in list(self._waiting.items()):
            failed = self._refusal(opened.page_bytes)
            if not failed and not self._has_size(sum(opened.page_bytes)):
                continue
            del self._waiting[identity]
            memory = () if failed else self.memory.segments(opened.page_bytes, self._path)
            if not failed:
                self.clients[identity] = Client(incarnation, opened.page_bytes, memory)
            sends.append(Send(identity, kv.PagesOpened(memory, failed)))
        return sends

    def _refusal(self, page_bytes: tuple[int, ...]) -> str:
        """Why there is no memory for such pages; "" where there is, or will be."""
        size = sum(page_bytes)
        if not size or min(page_bytes) <= 0:
            return "a page has no bytes"
        if size > self.memory.num_bytes:
            return f"a page has {size} bytes, and the store {self.memory.num_bytes}"
        others = next((identity for identity, client in self.clients.items() if client.slot_bytes != size), None)
        if others is not None:
            return (
                f"a page has {size} bytes, and those of {others}, which are in the store, have {self.memory.slot_bytes}"
            )
        return ""

    def _has_size(self, slot_bytes: int) -> bool:
        """Whether slots have this size, now that no client has pages of another one."""
        if self.memory.slot_bytes != slot_bytes:
            if self.memory.in_use:
                return False
            self.memory.divide(slot_bytes)
        return True

    def _forget(self, identity: Identity, now: float) -> None:
        """The scheduler is no client any more. Its leases are void, and its workers may copy until they end."""
        if (client := self.clients.pop(identity, None)) is not None:
            self._void += [(now + kv.LEASE_S, lease) for lease in client.leases.values()]

    def _end_void(self, now: float) -> None:
        for ends_at, lease in self._void:
            if ends_at <= now:
                lease.end(self.memory)
        self._void = [(ends_at, lease) for ends_at, lease in self._void if ends_at > now]

    # --- pages ---

    def _find(self, client: Client | None, ask: kv.FindPages) -> kv.PagesFound:
        if client is None or ask.number <= client.last_number:
            return kv.PagesFound(ask.number, b"")
        client.last_number = ask.number
        lease, pages = Lease(), []
        for key, width in _keys(ask):
            self._ceiling.looked_up(key)
            self.counts.add("kv_store_queries")
            stored = self.memory.find(key, width)
            if stored is None or stored.state is not State.STORED:
                pages += [kv.NOT_HERE] * width
                continue
            self.counts.add("kv_store_hits", "memory")
            self.memory.hit(stored)
            lease.reads.append(stored)
            pages += stored.slots
        if not lease.reads:
            return kv.PagesFound(ask.number, b"")
        client.leases[ask.number] = lease
        return kv.PagesFound(ask.number, pack_i32(pages), client.memory)

    def _offered(self, client: Client | None, offer: kv.OfferPages) -> kv.PagesWanted:
        keys = list(_keys(offer))
        lease = Lease(writes=[None] * len(keys))
        if client is not None and offer.number > client.last_number:
            client.last_number = offer.number
            lease.writes = [self._wanted(key, width) for key, width in keys]
            if any(lease.writes):
                client.leases[offer.number] = lease
        pages: list[int] = []
        for (_, width), stored in zip(keys, lease.writes):
            pages += [kv.NOT_HERE] * width if stored is None else stored.slots
        return kv.PagesWanted(offer.number, pack_i32(pages))

    def _wanted(self, key: bytes, width: int) -> Stored | None:
        self._ceiling.offered(key)
        if key in self.memory.keys:
            return None
        if not self._admission.takes(key):
            self.counts.add("kv_store_refused", "threshold")
            return None
        if (stored := self.memory.reserve(key, width)) is None:
            self.counts.add("kv_store_refused", "no_room")
        return stored

    def _read(self, client: Client, lease: Lease) -> None:
        """Its scheduler has read what it wanted to."""
        lease.end(self.memory)
        self.counts.add("kv_store_read_bytes", "memory", num_pages(lease.reads) * client.slot_bytes)

    def _written(self, client: Client, written: list[Stored]) -> None:
        self.counts.add("kv_store_stored", "memory", len(written))
        self.counts.add("kv_store_written_bytes", "memory", num_pages(written) * client.slot_bytes)

    # --- figures ---

    def told(self) -> ProcessCounts:
        """The counts as of now."""
        counts, memory, ceiling = self.counts, self.memory, self._ceiling
        counts.gauges["kv_store_pages"] = {name: float(count) for name, count in memory.pages().items()}
        counts.gauges["kv_store_capacity_bytes"] = {"memory": float(memory.num_bytes)}
        counts.gauges["kv_store_bytes"] = {"memory": float(memory.stored_bytes)}
        counts.gauges["kv_store_hit_rate_ceiling"] = {"": ceiling.hit_rate}
        return counts.told()

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.memory.check()
        held: dict[bytes, int] = {}
        living = (lease for client in self.clients.values() for lease in client.leases.values())
        for lease in (*living, *(lease for _, lease in self._void)):
            for stored in (*lease.reads, *(one for one in lease.writes if one is not None)):
                assert self.memory.keys.get(stored.key) is stored, "a lease holds what is not there"
                held[stored.key] = held.get(stored.key, 0) + 1
            assert all(stored.state is State.STORED for stored in lease.reads)
            assert all(stored is None or stored.state is State.WRITING for stored in lease.writes)
        assert held == {key: stored.num_uses for key, stored in self.memory.keys.items() if stored.num_uses}, (
            "a lost lease"
        )
        for client in self.clients.values():
            assert client.slot_bytes == self.memory.slot_bytes


def _keys(message: kv.FindPages | kv.OfferPages) -> Iterator[tuple[bytes, int]]:
    """Each key with its namespace, and how many pages it has."""
    size = kv.KEY_BYTES
    for place, width in enumerate(message.widths):
        yield message.namespace + message.keys[place * size : (place + 1) * size], width
