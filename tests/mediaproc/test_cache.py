"""The cache of files: any history of holders keeps its bytes, and no file goes that somebody holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.mediaproc.cache import FileCache
from meshlm.mediaproc.holds import Holder
from meshlm.protocol.edges.media import LEASE_S, Hold, HoldMedia
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, Role

ROOM = 20
ROLES = (Role.FRONTEND, Role.DETOKENIZER)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), st.integers(0, 25)),
    st.tuples(st.sampled_from(["hold", "release", "lost release"]), st.integers(0, 5), st.integers(0, 7)),
    st.tuples(st.sampled_from(["die", "say", "part", "twice"]), st.integers(0, 1), st.integers(0, 3)),
    st.tuples(st.just("later"), st.just(0), st.integers(1, 30)),
    st.tuples(st.just("vanish"), st.integers(0, 5), st.just(0)),
)


class Process:
    """A holder, as it knows itself."""

    def __init__(self, number: int, life: int) -> None:
        self.name = Holder(Identity(ROLES[number]), Incarnation(life))
        self.holds: dict[int, set[bytes]] = {}
        self.said_at = 0.0

    def said(self, after: int = 0, through: int = 100) -> HoldMedia:
        holds = [
            Hold(Handle(handle), tuple(sorted(held)))
            for handle, held in self.holds.items()
            if after < handle <= through
        ]
        return HoldMedia(tuple(holds), after, through)


class World:
    def __init__(self) -> None:
        self.cache, self.now = FileCache(ROOM), 0.0
        self.files: dict[bytes, int] = {}
        self.alive = [Process(0, 1), Process(1, 1)]
        self.dead: list[Process] = []
        self.unsaid: list[tuple[Holder, Handle]] = []  # releases that did not come

    def needed(self) -> set[bytes]:
        """What a process that is heard of, or was until now, needs."""
        heard = [one for one in self.alive if one.said_at + LEASE_S > self.now]
        return {digest for one in heard for held in one.holds.values() for digest in held}

    def add(self, digest: bytes, size: int) -> None:
        held = self.cache.num_held_bytes
        going = self.cache.add(digest, size)
        assert (going is None) == (held + size > ROOM), "refused with room, or taken without"
        for other in going or ():
            del self.files[other]
            assert other not in self.needed(), "a file that is needed went"
        if going is not None:
            self.files[digest] = size

    def hold(self, number: int, handle: int, digest: bytes) -> None:
        process = self.alive[number]
        if process.said_at + LEASE_S <= self.now:
            self.say(process)
        process.said_at = self.now
        process.holds.setdefault(handle, set()).add(digest)
        assert self.cache.hold(process.name, Handle(handle), digest, self.now) == (digest in self.files)

    def say(self, process: Process, after: int = 0, through: int = 100) -> None:
        process.said_at = self.now
        self.cache.say(process.name, process.said(after, through), self.now)

    def release(self, number: int, handle: int, *, lost: bool) -> None:
        process = self.alive[number]
        process.holds.pop(handle, None)
        if not lost:
            self.cache.release(process.name, Handle(handle))

    def later(self, seconds: int) -> None:
        self.now += seconds
        self.cache.expire(self.now)


@settings(max_examples=600)
@given(st.lists(ACTIONS, max_size=80))
def test_any_history(actions: list[tuple[str, int, int]]) -> None:
    world, lives = World(), 1
    for name, which, number in actions:
        digest = bytes([which])
        match name:
            case "add" if digest not in world.files:
                world.add(digest, number)
            case "hold":
                world.hold(number % 2, 1 + number // 2, digest)
            case "release" | "lost release":
                world.release(number % 2, 1 + number // 2, lost=name == "lost release")
            case "die":  # what it held ends with its lease; its next incarnation holds nothing
                lives += 1
                world.alive[which] = Process(which, lives)
            case "say":
                world.say(world.alive[which])
            case "part":  # of what it holds, of some handles
                world.cache.say(world.alive[which].name, world.alive[which].said(number, number + 1), world.now)
            case "twice":
                world.release(which, number, lost=False)
                world.release(which, number, lost=False)
            case "later":
                world.later(number)
            case "vanish":
                world.files.pop(digest, None)
                world.cache.keep_only(frozenset(world.files))
        world.cache.check()
        assert len(world.cache) == len(world.files)
        assert world.cache.num_bytes == sum(world.files.values())
        held = sum(world.files[digest] for digest in world.needed() if digest in world.files)
        assert held <= world.cache.num_held_bytes
    for process in world.alive:  # nothing leaks: what is left is what is said
        world.say(process)
    world.later(int(LEASE_S) - 1)
    for process in world.alive:
        world.say(process)
    world.later(1)
    assert world.cache.num_held == len(world.needed() & world.files.keys())
    world.later(int(LEASE_S))
    assert world.cache.num_held == world.cache.num_held_bytes == 0
    world.cache.check()


def test_what_was_used_least_recently_goes_first() -> None:
    cache, holder = FileCache(3), Holder(Identity(Role.FRONTEND), Incarnation(1))
    for digest in (b"a", b"b", b"c"):
        assert cache.add(digest, 1) == []
    cache.hold(holder, Handle(1), b"a", 1.0)
    assert cache.add(b"d", 3) is None
    cache.release(holder, Handle(1))
    assert cache.add(b"d", 2) == [b"b", b"c"]


def test_a_file_that_comes_back_is_held_by_who_holds_it_still() -> None:
    cache, holder = FileCache(3), Holder(Identity(Role.FRONTEND), Incarnation(1))
    assert not cache.hold(holder, Handle(1), b"a", 0.0)
    cache.add(b"a", 2)
    assert cache.add(b"b", 2) is None
    cache.expire(LEASE_S)
    assert cache.add(b"b", 2) == [b"a"]
