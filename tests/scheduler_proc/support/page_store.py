"""A store of pages for tests: as much as a scheduler can see of it."""

from typing import Any

from kv_device import BLOCK

from meshlm.protocol.edges.kv import (
    KEY_BYTES,
    LEASE_S,
    NOT_HERE,
    EndLease,
    FindPages,
    LeaseEnded,
    OfferPages,
    OpenPages,
    PageMemory,
    PagesFound,
    PagesOpened,
    PagesStored,
    PagesWanted,
)
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Identity


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class PageStore:
    """`world` has its memory, by worker of a rank."""

    lives = 0

    def __init__(self, world: Any, num_pages: int) -> None:
        PageStore.lives += 1
        self.world, self.num_pages = world, num_pages
        self.memory = []
        for worker in range(world.num_workers):
            path = f"store {PageStore.lives} {worker}"
            world.memory[path] = {page: ["garbage"] * BLOCK for page in range(num_pages)}
            self.memory.append(PageMemory(path, num_pages, ()))
        self.keys: dict[tuple[bytes, bytes], list[int]] = {}  # least recently used first
        self.leases: dict[tuple[Identity, int], tuple[list[int], float]] = {}
        self.offers: dict[tuple[Identity, int], tuple[list[tuple[bytes, bytes]], list[list[int]]]] = {}
        self.free = list(range(num_pages))
        self.lost_pages: list[tuple[list[int], float]] = []  # workers may still read them ...
        self.lost_offers: list[tuple[list[int], float]] = []  # ... or write these

    def take(self, sender: Identity, message: Any) -> list[Any]:
        match message:
            case OpenPages():
                self.lost(sender)
                return [PagesOpened(tuple(self.memory))]
            case FindPages():
                return [self.find(sender, message)]
            case EndLease(number=number):
                return [LeaseEnded(number, self.leases.pop((sender, number), None) is not None)]
            case OfferPages():
                return [self.offered(sender, message)]
            case PagesStored(number=number, stored=stored):
                keys, pages = self.offers.pop((sender, number), ([], []))
                assert len(stored) == len(keys)
                for key, some, is_stored in zip(keys, pages, stored, strict=True):
                    if is_stored and some and key not in self.keys:
                        self.keys[key] = some
                    else:
                        assert some or not is_stored
                        self.free += some
        return []

    def find(self, sender: Identity, asked: FindPages) -> PagesFound:
        pages: list[int] = []
        leased: list[int] = []
        for key, width in zip(split(asked.keys), asked.widths, strict=True):
            some = self.keys.get((asked.namespace, key))
            pages += some or [NOT_HERE] * width
            leased += some or ()
        if not leased:
            return PagesFound(asked.number, b"")
        self.leases[sender, asked.number] = leased, self.world.now + LEASE_S
        return PagesFound(asked.number, pack_i32(pages))

    def offered(self, sender: Identity, offer: OfferPages) -> PagesWanted:
        names = [(offer.namespace, key) for key in split(offer.keys)]
        here: list[list[int]] = []
        for name, width in zip(names, offer.widths, strict=True):
            wanted = name not in self.keys and self._make_room(width)
            here.append([self.free.pop() for _ in range(width)] if wanted else [])
        if any(here):
            self.offers[sender, offer.number] = names, here
        pages = [some or [NOT_HERE] * width for some, width in zip(here, offer.widths, strict=True)]
        return PagesWanted(offer.number, pack_i32([page for some in pages for page in some]))

    def _make_room(self, width: int) -> bool:
        used = {page for pages, _ in self.leases.values() for page in pages}
        used |= {page for pages, _ in self.lost_pages for page in pages}
        for key in [key for key, pages in self.keys.items() if not used.intersection(pages)]:
            if len(self.free) >= width:
                break
            self.free += self.keys.pop(key)
        return len(self.free) >= width

    def lost(self, sender: Identity) -> None:
        """Its leases and offers are void; copies may still run for a moment."""
        for one in [one for one in self.leases if one[0] == sender]:
            self.lost_pages.append(self.leases.pop(one))
        for one in [one for one in self.offers if one[0] == sender]:
            _, pages = self.offers.pop(one)
            self.lost_offers.append(([page for some in pages for page in some], self.world.now + LEASE_S))

    def tick(self) -> None:
        self.leases = {one: lease for one, lease in self.leases.items() if lease[1] > self.world.now}
        for pages, until in self.lost_offers:
            self.free += pages if until <= self.world.now else ()
        self.lost_offers = [one for one in self.lost_offers if one[1] > self.world.now]
        self.lost_pages = [one for one in self.lost_pages if one[1] > self.world.now]
