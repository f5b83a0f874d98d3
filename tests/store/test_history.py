"""Any history of offers, lookups, deaths, and of messages that are lost, late or come twice: no slot has two users, none is lost, and
what is found is what was written.

Each slot's content is a key, written by a worker some time after the store asked for it. Whoever leases a slot for reading must find
the key that it asked for; whoever writes one must be alone.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from store_bench import NAMESPACE, S0, S1, S2, Bench, key, keys

from meshlm.protocol.edges import kv
from meshlm.protocol.edges.kv import LEASE_S, NOT_HERE
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import Identity
from meshlm.store.disk.content import HEADER_BYTES
from meshlm.store.disk.events import FileRead, FileWritten, ReadFile, WriteFile

NUM_PAGES, NUM_KEYS = 6, 9
SIZES = ((100,), (60, 40), (150,))


@dataclass
class Rank:
    """A scheduler and its workers. `copies`: slot -> what is written there, until the given moment at the latest."""

    life: int = 0
    is_open: bool = False
    asked: dict[int, list[int]] = field(default_factory=dict)  # number -> keys
    reads: dict[int, dict[int, int]] = field(default_factory=dict)  # lease -> slot -> key
    writes: dict[int, tuple[list[int], dict[int, int]]] = field(default_factory=dict)  # lease -> keys, slot -> key
    sent: list[Struct] = field(default_factory=list)  # what may come again


class World:
    """Three ranks, a store, and its disk, of which nothing is known but what its threads say."""

    def __init__(self, *, has_disk: bool) -> None:
        self.bench = Bench(NUM_PAGES, disk_bytes=5 * (HEADER_BYTES + 100) if has_disk else -1)
        self.ranks = {identity: Rank() for identity in (S0, S1, S2)}
        self.content: dict[int, int] = {}  # slot -> key
        self.files: dict[bytes, int] = {}  # what is in each key's file
        self.running: list[tuple[float, dict[int, int], bool]] = []  # copies of lost leases: deadline, slots, writes

    def users(self) -> tuple[set[int], list[int]]:
        """Slots that are read, and those that are written, of workers that may copy now."""
        now = self.bench.now
        late = [(slots, writes) for until, slots, writes in self.running if now < until]
        reads = {slot for rank in self.ranks.values() for lease in rank.reads.values() for slot in lease}
        writes = [slot for rank in self.ranks.values() for _, lease in rank.writes.values() for slot in lease]
        reads |= {slot for slots, is_write in late if not is_write for slot in slots}
        writes += [slot for slots, is_write in late if is_write for slot in slots]
        for effect in self.bench.files:
            if isinstance(effect, ReadFile):
                writes += effect.slots
            elif isinstance(effect, WriteFile):
                reads |= set(effect.slots)
        return reads, writes

    def check(self) -> None:
        reads, writes = self.users()
        assert len(writes) == len(set(writes)), "two write one slot"
        assert not reads & set(writes), "it is written while somebody reads it"
        for rank in self.ranks.values():
            for lease in rank.reads.values():
                assert all(self.content.get(slot) == number for slot, number in lease.items()), "another key's page"

    def says(self, identity: Identity, message: Struct) -> None:
        self.ranks[identity].sent.append(message)
        self.hears(identity, self.bench.says(identity, message, self.ranks[identity].life))

    def hears(self, identity: Identity, sends: list) -> None:  # type: ignore[type-arg]
        for send in sends:
            rank = self.ranks[send.to]
            match send.message:
                case kv.PagesOpened(failed=failed):
                    rank.is_open = not failed
                case kv.PagesFound(number=number, pages=pages) if number in rank.asked and pages:
                    found = zip(ints(pages), rank.asked.pop(number), strict=True)
                    rank.reads[number] = {slot: key for slot, key in found if slot != NOT_HERE}
                case kv.PagesFound(number=number, pages=pages) if pages:  # nobody waits for it any more
                    self.bench.says(send.to, kv.EndLease(number), rank.life)
                case kv.PagesWanted(number=number, pages=pages) if number in rank.asked:
                    found = zip(ints(pages), wanted := rank.asked.pop(number), strict=True)
                    slots = {slot: key for slot, key in found if slot != NOT_HERE}
                    if slots:
                        rank.writes[number] = wanted, slots
        self.check()

    def disk_works(self, choice: int) -> None:
        """A thread is done. Readers work side by side; what the writer does comes in its order. Anything may fail."""
        files = self.bench.files
        reads = [effect for effect in files if isinstance(effect, ReadFile)]
        effect = reads[choice % len(reads)] if reads and choice % 2 else files[0]
        files.remove(effect)
        event = self.bench.done(effect)
        match effect, event:
            case ReadFile(), FileRead(failure=""):
                failure = {3: "sum", 5: "Input/output error"}.get(choice % 25, "")
                event = FileRead(effect.key, choice / 1e4, failure, is_bad=failure == "sum")
                number = -1 if failure else self.files[effect.key]
                self.content |= dict.fromkeys(effect.slots, number)
            case WriteFile(), FileWritten() if choice % 50 == 0:
                del self.bench.disk[effect.key]
                event = FileWritten(effect.key, failure="No space left on device")
            case WriteFile(), FileWritten():
                self.files[effect.key] = number = self.content[effect.slots[0]]
                assert effect.key == NAMESPACE + key(number), "another key's page is kept"
        self.hears(S0, self.bench.event(event))

    def dies(self, identity: Identity) -> None:
        """Its workers copy on, for as long as their moves' deadlines let them."""
        rank, until = self.ranks[identity], self.bench.now + LEASE_S
        self.running += [(until, lease, False) for lease in rank.reads.values()]
        self.running += [(until, lease, True) for _, lease in rank.writes.values()]
        self.ranks[identity] = Rank(rank.life + 1, sent=rank.sent[-3:])

    def writes_late(self, place: int) -> None:
        """A worker of a lost scheduler writes a page, if it still may."""
        late = [slots for until, slots, is_write in self.running if is_write and self.bench.now < until]
        if late:
            self.content |= late[place % len(late)]


def act(world: World, action: tuple[int, int, list[int], int]) -> None:
    what, index, numbers, choice = action
    identity = (S0, S1, S2)[index]
    rank, bench = world.ranks[identity], world.bench
    wanted = list(dict.fromkeys(numbers))
    match what:
        case 0:
            world.dies(identity)
            world.ranks[identity] = Rank(rank.life, sent=rank.sent)
            world.says(identity, kv.OpenPages(NAMESPACE, SIZES[2 if choice % 5 == 0 else choice % 2]))
        case 1 | 2 if rank.is_open:
            number = bench.next_number(identity)
            rank.asked[number] = wanted
            kind = kv.FindPages if what == 1 else kv.OfferPages
            world.says(identity, kind(number, NAMESPACE, keys(wanted), b"\1" * len(wanted)))
        case 3 if rank.writes:
            number, (offered, slots) = list(rank.writes.items())[choice % len(rank.writes)]
            del rank.writes[number]
            failed = offered[choice % len(offered)] if choice % 3 == 0 else None
            world.content |= {slot: key for slot, key in slots.items() if key != failed}
            world.content |= {slot: -1 for slot, key in slots.items() if key == failed}
            world.says(identity, kv.PagesStored(number, bytes(key != failed for key in offered)))
        case 4 if rank.reads:
            number = list(rank.reads)[choice % len(rank.reads)]
            del rank.reads[number]
            world.says(identity, kv.EndLease(number))
        case 5:  # the link is lost with all that was on it, or the process is
            world.dies(identity)
            world.hears(identity, bench.lost(identity, rank.life))
        case 6 if rank.sent:  # comes twice, or late: of an earlier incarnation, too
            message = rank.sent[choice % len(rank.sent)]
            if not isinstance(message, kv.OpenPages | kv.PagesStored | kv.EndLease):
                world.hears(identity, bench.says(identity, message, rank.life))
        case 7:
            world.writes_late(choice)
            bench.now += (0.5, 7, LEASE_S)[choice % 3]
            world.hears(identity, bench.tick(0.5))
        case 8 if rank.asked:  # an answer was not waited for
            rank.asked.popitem()
        case 9 if bench.files:
            world.disk_works(choice)


WHATS = st.sampled_from((0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8, 9, 9, 9, 9))
NUMBERS = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=5)
ACTIONS = st.tuples(WHATS, st.integers(0, 2), NUMBERS, st.integers(0, 99))


@pytest.mark.parametrize("has_disk", [False, True])
@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=60, max_size=80))
def test_no_slot_has_two_users_and_none_is_lost(actions: list[tuple[int, int, list[int], int]], has_disk: bool) -> None:
    world = World(has_disk=has_disk)
    for identity in world.ranks:
        world.says(identity, kv.OpenPages(NAMESPACE, SIZES[0]))
    for action in actions:
        act(world, action)
    for identity, rank in list(world.ranks.items()):
        world.dies(identity)
        world.hears(identity, world.bench.lost(identity, rank.life))
    world.bench.tick(LEASE_S + 1)
    while world.bench.files:
        world.disk_works(1)
    assert not world.bench.core.memory.in_use, "a slot is leased to nobody"
    assert world.bench.core.clients == {}
