"""A store on the bench, and what schedulers say to it: shared by its tests."""

import hashlib
from collections.abc import Iterable, Sequence

from msgspec import Struct

from meshlm.protocol.edges import kv
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick
from meshlm.store.admission import Admission
from meshlm.store.core import Event, Store
from meshlm.store.disk.content import HEADER_BYTES
from meshlm.store.disk.events import (
    DeleteFile,
    DiskEffect,
    DiskEvent,
    FileRead,
    FileWritten,
    Listed,
    ListFiles,
    ReadFile,
    WriteFile,
)

S0, S1, S2 = (Identity(Role.SCHEDULER, index) for index in range(3))
NAMESPACE = b"n" * kv.NAMESPACE_BYTES
PAGE_BYTES = 100


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def keys(numbers: Iterable[int]) -> bytes:
    return b"".join(map(key, numbers))


class Bench:
    """A store of `num_pages` pages, a clock, and a check after every event."""

    def __init__(self, num_pages: int = 10, threshold: int = 0, disk_bytes: int | None = -1) -> None:
        self.core = Store(num_pages * PAGE_BYTES, "/proc/7/fd/9", Admission(threshold), disk_bytes)
        self.files: list[DiskEffect] = []  # what the threads are asked to do, and have not done
        self.disk: dict[bytes, int] = {}  # bytes by key
        self.free_bytes: int | None = None
        self.read_s = 0.001  # that a file takes
        self.now = 1000.0
        self.numbers: dict[Identity, int] = {}
        self.lives: dict[Identity, int] = {}

    def event(self, event: Event) -> list[Send]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        self.files += [effect for effect in effects if not isinstance(effect, Send)]
        return [effect for effect in effects if isinstance(effect, Send)]

    def works(self, most: int = 1000) -> list[Send]:
        """The second tier's threads do what they are asked for, on a disk that never fails; what is sent meanwhile."""
        sends = []
        for _ in range(most):
            if not self.files:
                break
            sends += self.event(self.done(self.files.pop(0)))
        return sends

    def done(self, effect: DiskEffect) -> DiskEvent | Tick:
        """What came of it. Of a deletion nobody hears."""
        match effect:
            case WriteFile():
                self.disk[effect.key] = size = HEADER_BYTES + len(effect.slots) * effect.slot_bytes
                return FileWritten(effect.key, size)
            case ReadFile():
                there = effect.key in self.disk
                return FileRead(effect.key, self.read_s, "" if there else "gone", is_gone=not there)
            case DeleteFile():
                self.disk.pop(effect.key, None)
                return Tick(1.75e9 + self.now)
            case ListFiles():
                return Listed(dict(self.disk), self.free_bytes)

    def says(self, sender: Identity, message: Struct, life: int | None = None) -> list[Send]:
        life = self.lives.get(sender, 1) if life is None else life
        return self.event(Received(sender, Incarnation(life), message))

    def lost(self, identity: Identity, life: int | None = None) -> list[Send]:
        return self.event(PeerLost(identity, Incarnation(self.lives.get(identity, 1) if life is None else life)))

    def tick(self, later_s: float = 1.0) -> list[Send]:
        self.now += later_s
        return self.event(Tick(1.75e9 + self.now))

    def opens(self, sender: Identity, page_bytes: Sequence[int] = (PAGE_BYTES,)) -> kv.PagesOpened | None:
        sends = self.says(sender, kv.OpenPages(NAMESPACE, tuple(page_bytes)))
        found = [send.message for send in sends if send.to == sender]
        assert len(found) <= 1
        return found[0] if found and isinstance(found[0], kv.PagesOpened) else None

    def next_number(self, sender: Identity) -> int:
        self.numbers[sender] = self.numbers.get(sender, 0) + 1
        return self.numbers[sender]

    def finds(self, sender: Identity, numbers: Sequence[int], width: int = 1, **more: object) -> tuple[int, list[int]]:
        """The lease's number, and pages by key and page; [] where nothing was there."""
        number = self.next_number(sender)
        ask = kv.FindPages(number, NAMESPACE, keys(numbers), bytes([width] * len(numbers)), **more)  # type: ignore[arg-type]
        (send,) = self.says(sender, ask)
        assert isinstance(send.message, kv.PagesFound)
        assert send.to == sender
        assert send.message.number == number
        return number, ints(send.message.pages)

    def offers(self, sender: Identity, numbers: Sequence[int], width: int = 1) -> tuple[int, list[int]]:
        """The lease's number, and wanted pages by key and page."""
        number = self.next_number(sender)
        (send,) = self.says(sender, kv.OfferPages(number, NAMESPACE, keys(numbers), bytes([width] * len(numbers))))
        assert isinstance(send.message, kv.PagesWanted)
        assert send.message.number == number
        return number, ints(send.message.pages)

    def stores(self, sender: Identity, numbers: Sequence[int], width: int = 1) -> list[int]:
        """Offers and writes; gives the pages."""
        number, wanted = self.offers(sender, numbers, width)
        assert self.says(sender, kv.PagesStored(number, b"\1" * len(numbers))) == []
        return wanted

    def ends(self, sender: Identity, number: int) -> bool:
        (send,) = self.says(sender, kv.EndLease(number))
        assert isinstance(send.message, kv.LeaseEnded)
        assert send.message.number == number
        return send.message.valid
