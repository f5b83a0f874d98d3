"""The store's pure core: which keys it has, where their pages lie, and who reads or writes them (docs/moved-kv.md).

`handle(event, now)` gets messages of schedulers, their deaths and what the second tier's threads have done, and answers with messages
to send and files to read and write. Called by io.py.

A scheduler opens its pages (OpenPages) and is a client from then on. FindPages leases what is there, and is answered once what is worth
reading of the second tier is read; OfferPages leases room for what is wanted. All slots have the size that the clients' pages have; a
rank with another size waits for the last lease of those, once the last client that has them is gone, and then the content is dropped.
"""

from meshlm.protocol.counts import STORE, ProcessCounts
from meshlm.protocol.edges import kv
from meshlm.protocol.wire.ids import Identity, Incarnation
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick
from meshlm.store.admission import Admission
from meshlm.store.ceiling import Ceiling
from meshlm.store.disk.events import DiskEffect, DiskEvent, FileRead, FileWritten, Listed
from meshlm.store.disk.tier import ANSWER_S, Tier
from meshlm.store.leases import Client, Lease, Question
from meshlm.store.memory import Memory, State, Stored, num_pages

Event = Received | PeerLost | Tick | DiskEvent
Effect = Send | DiskEffect


class Store:
    """`path`: the memory, as its readers open it. disk_bytes: as Tier's max_bytes; -1: there is no second tier."""

    def __init__(
        self, num_bytes: int, path: str, admission: Admission | None = None, disk_bytes: int | None = -1
    ) -> None:
        self.counts = Counts(STORE)
        self.memory, self._path = Memory(num_bytes, self.counts), path
        self.disk = Tier(self.memory, self.counts, disk_bytes) if disk_bytes != -1 else None
        self._admission, self._ceiling = admission or Admission(), Ceiling()
        self.clients: dict[Identity, Client] = {}
        self._void: list[tuple[float, Lease]] = []  # each with the moment at which it ends
        self._waiting: dict[
            Identity, tuple[Incarnation, kv.OpenPages]
        ] = {}  # for the last lease of pages of another size
        self._questions: list[Question] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Received():
                effects += self._received(event, now)
            case PeerLost():
                client = self.clients.get(event.identity)
                if client is not None and client.incarnation == event.incarnation:
                    self._forget(event.identity, now)
                self._waiting.pop(event.identity, None)
            case Tick():
                self._end_void(now)
                effects += self._answer_late(now)
            case _:
                effects += self._disk_event(event, now)
        if self._waiting:
            effects += self._open_waiting()
        if self.disk is not None:
            self.disk.go_on(now)
            effects += self.disk.effects
            self.disk.effects.clear()
        return effects

    def _received(self, event: Received, now: float) -> list[Send]:
        sender, message = event.sender, event.message
        client = self.clients.get(sender)
        if isinstance(message, kv.OpenPages) or (client is not None and client.incarnation != event.incarnation):
            self._forget(sender, now)
            client = None
        match message:
            case kv.OpenPages():
                before, self._waiting[sender] = self._waiting.get(sender), (event.incarnation, message)
                return [Send(sender, kv.PagesOpened(failed="another one followed"))] if before is not None else []
            case kv.FindPages():
                return self._find(sender, client, message, now)
            case kv.OfferPages():
                return [Send(sender, self._offered(client, message))]
            case kv.PagesStored():
                if client is not None and (lease := client.leases.pop(message.number, None)) is not None:
                    self._written(client, lease.end(self.memory, message.stored))
            case kv.EndLease():
                return [Send(sender, kv.LeaseEnded(message.number, self._ended(client, message.number)))]
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
                if self.disk is not None:
                    self.disk.open(opened.namespace)
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
            self._questions = [question for question in self._questions if question.sender != identity]
            self._void += [(now + kv.LEASE_S, lease) for lease in client.leases.values()]

    def _end_void(self, now: float) -> None:
        for ends_at, lease in self._void:
            if ends_at <= now:
                lease.end(self.memory)
        self._void = [(ends_at, lease) for ends_at, lease in self._void if ends_at > now]

    # --- lookups ---

    def _find(self, sender: Identity, client: Client | None, ask: kv.FindPages, now: float) -> list[Send]:
        if client is None or ask.number <= client.last_number:
            return [Send(sender, kv.PagesFound(ask.number, b""))]
        client.last_number = ask.number
        keys = _keys(ask)
        lease = Lease([self._hit(key, width) for key, width in keys], ask.widths, writes=False)
        client.leases[ask.number] = lease
        self.counts.add("kv_store_queries", amount=len(keys))
        if self.disk is not None:
            self.disk.open(ask.namespace)
            self._read_files(keys, lease, ask.block_s, now)
        missing = {stored.key for stored in lease.held if stored.state is not State.STORED}
        question = Question(sender, ask.number, lease, now + ANSWER_S, missing, frozenset(missing))
        if missing:
            self._questions.append(question)
            return []
        return [self._answer(question)]

    def _hit(self, key: bytes, width: int) -> Stored | None:
        """Uses a key that is there, or whose file is being read."""
        self._ceiling.looked_up(key)
        stored = self.memory.find(key, width)
        if stored is None:
            return None
        if stored.state is State.STORED:
            self.memory.hit(stored)
        elif self.disk is not None and key in self.disk.reading:
            self.memory.use(stored)
        else:
            return None
        return stored

    def _read_files(self, keys: list[tuple[bytes, int]], lease: Lease, compute_s: float, now: float) -> None:
        """Begins to read the files of as many keys as it is worth it for."""
        assert self.disk is not None
        there = [
            (place, key, width)
            for place, (key, width) in enumerate(keys)
            if lease.keys[place] is None and key not in self.memory.keys and self.disk.has(key, width)
        ]
        if not there:
            return
        num_bytes = sum(width for *_, width in there) * self.memory.slot_bytes // len(there)
        num_worth = self.disk.num_worth(num_bytes, len(there), compute_s, now)
        if num_worth < len(there):
            self.counts.add("kv_store_not_read", amount=len(there) - num_worth)
        for place, key, width in there[:num_worth]:
            if (stored := self.disk.read(key, width)) is None:
                return
            self.memory.use(stored)
            lease.keys[place] = stored

    def _answer(self, question: Question) -> Send:
        client, lease = self.clients[question.sender], question.lease
        from_disk = sum(stored.key in question.reads for stored in lease.held)
        for tier, count in (("memory", len(lease.held) - from_disk), ("disk", from_disk)):
            if count:
                self.counts.add("kv_store_hits", tier, count)
        if lease.is_empty:
            del client.leases[question.number]
            return Send(question.sender, kv.PagesFound(question.number, b""))
        return Send(question.sender, kv.PagesFound(question.number, lease.pages(), client.memory))

    def _answer_late(self, now: float) -> list[Send]:
        """Those who have waited for too long get what is there."""
        late = [question for question in self._questions if question.until <= now]
        self._questions = [question for question in self._questions if question.until > now]
        for question in late:
            for key in question.missing:
                self._leave(question.lease, key)
        return [self._answer(question) for question in late]

    def _leave(self, lease: Lease, key: bytes) -> None:
        """A key whose file was not read is not leased."""
        for place, stored in enumerate(lease.keys):
            if stored is not None and stored.key == key:
                self.memory.leave(stored)
                lease.keys[place] = None

    def _ended(self, client: Client | None, number: int) -> bool:
        """Whether the lease had held until now."""
        lease = client.leases.pop(number, None) if client is not None else None
        if client is None or lease is None:
            return False
        is_answered = not any(question.lease is lease for question in self._questions)
        self._questions = [question for question in self._questions if question.lease is not lease]
        if is_answered and not lease.writes:
            self.counts.add("kv_store_read_bytes", "memory", num_pages(lease.held) * client.slot_bytes)
        lease.end(self.memory)
        return is_answered

    def _disk_event(self, event: DiskEvent, now: float) -> list[Send]:
        assert self.disk is not None
        match event:
            case Listed():
                self.disk.listed(event, now)
            case FileWritten():
                self.disk.was_written(event, now)
            case FileRead():
                return self._was_read(event, now)
        return []

    def _was_read(self, event: FileRead, now: float) -> list[Send]:
        assert self.disk is not None
        stored = self.disk.was_read(event, now)
        if event.failure:
            leases = [lease for client in self.clients.values() for lease in client.leases.values()]
            for lease in (*leases, *(lease for _, lease in self._void)):
                if not lease.writes:
                    self._leave(lease, event.key)
        self.memory.written(stored, is_valid=not event.failure)
        answered = []
        for question in self._questions:
            question.missing.discard(event.key)
            if not question.missing:
                answered.append(question)
        self._questions = [question for question in self._questions if question.missing]
        return [self._answer(question) for question in answered]

    # --- offers ---

    def _offered(self, client: Client | None, offer: kv.OfferPages) -> kv.PagesWanted:
        keys = _keys(offer)
        lease = Lease([None] * len(keys), offer.widths, writes=True)
        if client is not None and offer.number > client.last_number:
            client.last_number = offer.number
            if self.disk is not None:
                self.disk.open(offer.namespace)
            lease.keys = [self._wanted(key, width) for key, width in keys]
            if not lease.is_empty:
                client.leases[offer.number] = lease
        return kv.PagesWanted(offer.number, lease.pages())

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

    def _written(self, client: Client, written: list[Stored]) -> None:
        self.counts.add("kv_store_stored", "memory", len(written))
        self.counts.add("kv_store_written_bytes", "memory", num_pages(written) * client.slot_bytes)
        if self.disk is not None:
            for stored in written:
                self.disk.offer(stored)

    # --- figures ---

    def told(self) -> ProcessCounts:
        """The counts as of now."""
        gauges, memory = self.counts.gauges, self.memory
        gauges["kv_store_pages"] = {name: float(count) for name, count in memory.pages().items()}
        gauges["kv_store_capacity_bytes"] = {"memory": float(memory.num_bytes)}
        gauges["kv_store_bytes"] = {"memory": float(memory.stored_bytes)}
        gauges["kv_store_hit_rate_ceiling"] = {"": self._ceiling.hit_rate}
        if self.disk is not None:
            gauges["kv_store_bytes"]["disk"] = float(self.disk.num_bytes)
            gauges["kv_store_paused"] = {"disk": float(bool(self.disk.failure))}
            if self.disk.capacity is not None:
                gauges["kv_store_capacity_bytes"]["disk"] = float(self.disk.capacity)
        return self.counts.told()

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.memory.check()
        reading = dict(self.disk.reading) if self.disk is not None else {}
        held = dict.fromkeys(reading, 1)
        if self.disk is not None:
            self.disk.check()
            if (writing := self.disk.writing) is not None:
                held[writing.key] = held.get(writing.key, 0) + 1
        waiting = {id(question.lease) for question in self._questions}
        living = (lease for client in self.clients.values() for lease in client.leases.values())
        for lease in (*living, *(lease for _, lease in self._void)):
            for stored in lease.held:
                assert self.memory.keys.get(stored.key) is stored, "a lease holds what is not there"
                held[stored.key] = held.get(stored.key, 0) + 1
                if lease.writes:
                    assert stored.state is State.WRITING
                elif stored.state is State.WRITING:
                    assert stored.key in reading, "it was never written"
        in_use = {key: stored.num_uses for key, stored in self.memory.keys.items() if stored.num_uses}
        assert held == in_use, "a lease is lost"
        for client in self.clients.values():
            assert client.slot_bytes == self.memory.slot_bytes
            for lease in client.leases.values():
                unread = {stored.key for stored in lease.held if not lease.writes and stored.state is State.WRITING}
                assert not unread or id(lease) in waiting, "it was answered before it was read"


def _keys(message: kv.FindPages | kv.OfferPages) -> list[tuple[bytes, int]]:
    """Each key with its namespace, and how many pages it has."""
    size, keys = kv.KEY_BYTES, message.keys
    return [
        (message.namespace + keys[place * size : (place + 1) * size], width)
        for place, width in enumerate(message.widths)
    ]
