"""The media process's core: any history of questions, cancels, deaths, doubled and late answers, with a check after each event."""

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.mediaproc import core as core_module
from meshlm.mediaproc.core import FORGOTTEN, MediaCore
from meshlm.mediaproc.events import (
    Drop,
    Effect,
    Event,
    Found,
    Gather,
    Gathered,
    Keep,
    Listed,
    Made,
    Make,
    Refusal,
    Skipped,
)
from meshlm.mediaproc.turns import ROOM_WAIT_S
from meshlm.protocol.edges.media import (
    LEASE_S,
    Hold,
    HoldMedia,
    MediaGone,
    MediaRead,
    MediaSource,
    ReadMedia,
    ReleaseMedia,
)
from meshlm.protocol.media import MediaItem, Modality
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Incarnation, Role
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick

FRONTENDS, DETOKENIZER = (Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1)), Identity(Role.DETOKENIZER)
SIZE, ROOM = 10, 30  # bytes of a file, and of all
BAD = b"bad"


def digest_of(data: bytes) -> bytes:
    return data.ljust(32, b".")


def source(data: bytes, *, url: str = "", uuid: str = "") -> MediaSource:
    return MediaSource(Modality.IMAGE, "messages[0]", "messages", data, url, uuid)


class Bench:
    """A media process whose threads do what they are told when the test says so, with the files that lie on the disk."""

    def __init__(self, room: int = ROOM) -> None:
        self.core, self.now = MediaCore(room, "/folder"), 0.0
        self.lives = dict.fromkeys(FRONTENDS, 1)
        self.work: list[Gather | Make] = []
        self.untold: list[Event] = []  # what threads have done, and the core does not know
        self.done: list[Event] = []
        self.files: dict[str, int] = {}  # by name
        self.asked: dict[
            tuple[Identity, int, int], tuple[bytes, ...]
        ] = {}  # with the incarnation: what must be answered
        self.answers: list[MediaRead] = []
        self.held: dict[
            tuple[Identity, int, int], tuple[set[str], float]
        ] = {}  # files of answers, and when they were said
        self.gone: list[bytes] = []
        self.vanished: set[str] = set()
        self._parts = 0

    def event(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        for effect in effects:
            self._perform(effect)
        now_held = {name for names, said in self.held.values() if said + LEASE_S > self.now for name in names}
        assert now_held <= self.files.keys() | self.vanished, "a file went that an answer needs"
        kept = {name: size for name, size in self.files.items() if not name.endswith(".part")}
        assert sum(kept.values()) == self.core.files.num_bytes <= self.core.files.max_bytes
        return effects

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Gather() | Make():
                self.work.append(effect)
            case Keep():
                self.files[effect.digest.hex()] = self.files.pop(effect.part)
            case Drop():
                self.files.pop(effect.name, None)
            case Send(message=MediaRead() as answer):
                wanted = self.asked.pop((effect.to, self.lives[effect.to], answer.handle))
                self.answers.append(answer)
                if not answer.error:
                    names = {item.digest.hex() for item in answer.items}
                    self.held[effect.to, self.lives[effect.to], answer.handle] = names, self.now
                    self.vanished -= names
                    assert tuple(item.digest for item in answer.items) == tuple(map(digest_of, wanted))
                    for item in answer.items:
                        assert item.path == f"/folder/{item.digest.hex()}"
                        assert item.digest.hex() in self.files, "an answer without its file"
            case Send(message=MediaGone(digests=digests)):
                self.gone += digests
                assert not {digest.hex() for digest in digests} & self.files.keys()

    def ask(self, frontend: Identity, handle: int, sources: Sequence[MediaSource], wanted: Sequence[bytes]) -> None:
        life = self.lives[frontend]
        self.asked[frontend, life, handle] = tuple(wanted)
        self.event(Received(frontend, Incarnation(life), ReadMedia(Handle(handle), tuple(sources))))

    def read(self, frontend: Identity, handle: int, *images: bytes) -> None:
        self.ask(frontend, handle, [source(data) for data in images], images)

    def cancel(self, frontend: Identity, handle: int) -> None:
        life = self.lives[frontend]
        self.asked.pop((frontend, life, handle), None)
        self.held.pop((frontend, life, handle), None)
        self.event(Received(frontend, Incarnation(life), ReleaseMedia(Handle(handle))))

    def renew(self, *images: bytes) -> None:
        holds = (Hold(Handle(7), tuple(map(digest_of, images))),) if images else ()
        self.event(Received(DETOKENIZER, Incarnation(1), HoldMedia(holds, 0, 100)))

    def say(self, frontend: Identity) -> None:
        """What a frontend says every ten seconds."""
        life, holds = self.lives[frontend], list[Hold]()
        for (of, its, handle), (names, _) in list(self.held.items()):
            if (of, its) == (frontend, life):
                holds.append(Hold(Handle(handle), tuple(map(bytes.fromhex, sorted(names)))))
                self.held[of, its, handle] = names, self.now
        holds += [Hold(Handle(handle)) for of, its, handle in self.asked if (of, its) == (frontend, life)]
        self.event(Received(frontend, Incarnation(life), HoldMedia(tuple(holds), 0, 10_000)))

    def die(self, frontend: Identity) -> None:
        """And its next incarnation counts its questions from 1 again."""
        life = self.lives[frontend]
        self.asked = {of: wanted for of, wanted in self.asked.items() if of[:2] != (frontend, life)}
        self.lives[frontend] += 1  # what it held is held until its lease ends
        self.event(PeerLost(frontend, Incarnation(life)))

    def step(self, at: int = 0) -> None:
        """A thread does one piece of work, and the core hears of it."""
        self.do(at)
        self.event(self.untold.pop())

    def do(self, at: int) -> None:
        self.untold.append(self.outcome(self.work.pop(at % len(self.work))))

    def outcome(self, effect: Gather | Make) -> Event:
        if not self.core.is_wanted(effect.job):
            return Skipped(effect)
        if isinstance(effect, Gather):
            data = effect.source.data or effect.source.url.encode()
            self.done.append(Gathered(effect.job, data, digest_of(data)))
        elif effect.data == BAD:
            self.done.append(Made(effect.job, refusal=Refusal("is bad")))
        else:
            self._parts += 1
            part = f"{self._parts}.part"
            self.files[part] = SIZE
            self.done.append(Made(effect.job, MediaItem(Modality.IMAGE, digest_of(effect.data), b"", b""), SIZE, part))
        return self.done[-1]

    def later(self, seconds: float) -> None:
        """Some seconds pass, and each has its tick."""
        for _ in range(int(seconds)):
            self.now += 1
            self.event(Tick(self.now))

    def finish(self) -> None:
        while self.work or self.untold:
            while self.untold:
                self.event(self.untold.pop())
            if self.work:
                self.step()

    def say_again(self, at: int) -> None:
        """An answer of a thread comes a second time."""
        event = self.done[at % len(self.done)]
        if isinstance(event, Made) and event.part:
            event = Made(event.job, event.item, event.num_bytes, f"again {event.part}")
            self.files[event.part] = SIZE
        self.event(event)


IMAGES = st.sampled_from([b"a", b"b", b"c", b"d", b"e", BAD])
ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 1), st.lists(IMAGES, min_size=1, max_size=3)),
    st.tuples(st.just("fetch"), st.integers(0, 1), IMAGES),
    st.tuples(st.just("name"), st.integers(0, 1), st.sampled_from([b"a", b"b"])),
    st.tuples(st.just("cancel"), st.integers(0, 1), st.integers(0, 5)),
    st.tuples(st.just("die"), st.integers(0, 1), st.none()),
    st.tuples(st.just("step"), st.integers(0, 9), st.none()),
    st.tuples(st.just("do"), st.integers(0, 9), st.none()),
    st.tuples(st.just("tell"), st.integers(0, 9), st.none()),
    st.tuples(st.just("again"), st.integers(0, 9), st.none()),
    st.tuples(st.sampled_from(["say", "cancel all"]), st.integers(0, 1), st.none()),
    st.tuples(st.just("renew"), st.just(0), st.lists(IMAGES, max_size=3)),
    st.tuples(st.just("later"), st.sampled_from([1, 30, 61]), st.none()),
    st.tuples(st.just("vanish"), st.integers(0, 5), st.none()),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_any_history(actions: list[tuple[str, int, object]]) -> None:
    """Every question has one answer, with the items of its own images, whose files are there; the files stay within their bytes."""
    bench, next_handle = Bench(), dict.fromkeys(FRONTENDS, 0)
    for name, number, more in actions:
        frontend = FRONTENDS[number % 2]
        if name in ("read", "fetch", "name"):
            next_handle[frontend] += 1
            handle = next_handle[frontend]
        match name:
            case "read":
                assert isinstance(more, list)
                bench.read(frontend, handle, *more)
            case "fetch":
                assert isinstance(more, bytes)
                bench.ask(frontend, handle, [source(b"", url=more.decode())], [more])
            case "name":
                assert isinstance(more, bytes)
                bench.ask(frontend, handle, [source(b"", uuid=more.decode())], [more])
                if not bench.answers or bench.answers[-1].error:
                    bench.ask(frontend, handle + 1000, [source(more, uuid=more.decode())], [more])
            case "cancel":
                assert isinstance(more, int)
                bench.cancel(frontend, next_handle[frontend] - more)
            case "die":
                bench.die(frontend)
                next_handle[frontend] = 0
            case "step" if bench.work:
                bench.step(number)
            case "do" if bench.work:
                bench.do(number)
            case "tell" if bench.untold:
                bench.event(bench.untold.pop(number % len(bench.untold)))
            case "again" if bench.done and bench.done[number % len(bench.done)] not in bench.untold:
                bench.say_again(number)
            case "renew":
                assert isinstance(more, list)
                bench.renew(*more)
            case "say":
                bench.say(frontend)
            case "cancel all":
                for one in range(1, next_handle[frontend] + 1):
                    bench.cancel(frontend, one)
            case "later":
                bench.later(number)
            case "vanish" if kept := [name for name in bench.files if not name.endswith(".part")]:
                bench.vanished.add(kept[number % len(kept)])
                del bench.files[kept[number % len(kept)]]
                bench.event(Listed(frozenset(bytes.fromhex(one) for one in bench.files if not one.endswith(".part"))))
    bench.finish()
    bench.later(ROOM_WAIT_S)  # for room, at most
    bench.finish()
    assert not bench.asked, "questions without an answer"
    assert not bench.core.asked
    assert not bench.core.jobs
    assert bench.core.num_waiting_bytes == 0
    bench.later(LEASE_S)
    assert bench.core.files.num_held == 0, "held by nobody"
    assert not [name for name in bench.files if name.endswith(".part")], "unfinished files were left"


def test_a_new_incarnations_question_is_not_answered_by_the_old_ones_image() -> None:
    """Both have the same handle, and the old one's image is made only now."""
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"theirs")
    bench.step()
    (made,) = [bench.outcome(effect) for effect in bench.work]
    bench.work.clear()
    bench.die(FRONTENDS[0])
    bench.read(FRONTENDS[0], 1, b"mine")
    assert Keep("1.part", digest_of(b"theirs")) in bench.event(made)
    assert not bench.answers
    bench.finish()
    assert [item.digest for item in bench.answers[0].items] == [digest_of(b"mine")]


def test_the_loss_of_an_incarnation_that_is_told_late_harms_not_the_next() -> None:
    bench = Bench()
    bench.lives[FRONTENDS[0]] = 2
    bench.read(FRONTENDS[0], 1, b"a")
    bench.event(PeerLost(FRONTENDS[0], Incarnation(1)))
    bench.finish()
    assert len(bench.answers) == 1


def test_who_comes_for_an_image_that_a_thread_has_just_skipped_has_it_all_the_same() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a")
    bench.step()
    bench.cancel(FRONTENDS[0], 1)
    skipped = bench.outcome(bench.work.pop())
    assert isinstance(skipped, Skipped)
    bench.read(FRONTENDS[1], 1, b"a")
    bench.step()
    bench.event(skipped)
    bench.finish()
    assert not bench.answers[0].error


def test_what_nobody_waits_for_is_forgotten() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a")
    bench.cancel(FRONTENDS[0], 1)
    bench.finish()
    assert not bench.core.jobs
    assert not bench.done


def test_files_that_are_held_stay_and_an_image_waits_for_the_first_that_is_free() -> None:
    bench = Bench()
    for handle, data in enumerate((b"a", b"b", b"c"), 1):
        bench.read(FRONTENDS[0], handle, data)
    bench.read(FRONTENDS[0], 4, b"d")
    bench.read(FRONTENDS[1], 1, b"e")
    bench.finish()
    assert len(bench.answers) == 3
    assert bench.core.turns.num_waiting_for_room == 2
    bench.later(30)
    bench.say(FRONTENDS[0])
    bench.cancel(FRONTENDS[0], 2)
    assert [answer.handle for answer in bench.answers] == [1, 2, 3, 4]
    assert bench.files.keys() - {"4.part", "5.part"} == {digest_of(data).hex() for data in (b"a", b"c", b"d")}
    bench.cancel(FRONTENDS[0], 1)
    bench.finish()
    assert (bench.answers[-1].handle, bench.answers[-1].error) == (1, "")
    bench.renew(b"b", b"e")
    assert bench.gone == [digest_of(b"b")]


def test_an_image_that_finds_no_room_for_long_is_refused() -> None:
    bench = Bench()
    for handle, data in enumerate((b"a", b"b", b"c", b"d", b"e"), 1):
        bench.read(FRONTENDS[0], handle, data)
    bench.finish()
    for _ in range(int(ROOM_WAIT_S // 10)):
        bench.later(10)
        bench.say(FRONTENDS[0])
    bench.later(4)
    assert len(bench.answers) == 3
    bench.later(1)
    assert [(answer.kind, "--mm-processor-cache-gb" in answer.error) for answer in bench.answers[3:]] == [
        (ErrorKind.OVERLOADED, True)
    ] * 2
    assert not [name for name in bench.files if name.endswith(".part")]


def test_what_a_dead_frontend_held_is_free_once_its_lease_has_ended() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a", b"b", b"c")
    bench.finish()
    bench.die(FRONTENDS[0])
    bench.renew(b"a")
    bench.read(FRONTENDS[1], 1, b"d")
    bench.finish()
    bench.later(LEASE_S - 1)
    assert len(bench.answers) == 1, "its requests may run on elsewhere"
    bench.renew(b"a")
    bench.later(1)
    assert not bench.answers[1].error
    assert digest_of(b"a").hex() in bench.files, "a detokenizer holds it"


def test_one_request_with_more_than_all_room_is_refused_at_once() -> None:
    bench = Bench()
    bench.read(FRONTENDS[0], 1, b"a", b"b", b"c", b"d")
    bench.read(FRONTENDS[1], 1, b"e")
    bench.finish()
    assert [(answer.handle, answer.kind) for answer in bench.answers if answer.error] == [(1, ErrorKind.INVALID)]
    assert len(bench.answers) == 2


def test_those_who_wait_for_room_have_few_files_and_leave_none() -> None:
    bench = Bench()
    for handle in range(1, 20):
        bench.read(FRONTENDS[0], handle, b"%d" % handle)
        bench.finish()
    assert len(bench.files) <= 3 + 4
    for handle in range(4, 20):
        bench.cancel(FRONTENDS[0], handle)
    bench.later(1)
    bench.finish()
    assert len(bench.files) == 3
    assert not bench.core.jobs


def test_what_is_larger_than_all_room_is_refused() -> None:
    bench = Bench(room=SIZE - 1)
    bench.read(FRONTENDS[0], 1, b"a")
    bench.finish()
    assert bench.answers[0].kind is ErrorKind.INVALID
    assert not bench.files


def test_files_of_the_incarnation_before_are_taken_over_as_far_as_there_is_room() -> None:
    bench = Bench()
    found = [digest_of(bytes([65 + number])) for number in range(4)]
    bench.files = {digest.hex(): SIZE for digest in found}
    effects = bench.core.handle(Found(tuple((digest, SIZE) for digest in found)), 0.0)
    assert effects == [Drop(found[3].hex())]
    assert len(bench.core.files) == 3
    bench.files.pop(found[3].hex())
    bench.renew(b"A", b"D")
    assert bench.gone == [digest_of(b"D")]


def test_too_many_bytes_that_wait_are_refused() -> None:
    bench = Bench()
    large = bytes(core_module.MAX_WAITING_BYTES // 2 + 1)
    bench.ask(FRONTENDS[0], 1, [source(large)], [large])
    bench.ask(FRONTENDS[0], 2, [source(large)], [large])
    assert [(answer.handle, answer.kind) for answer in bench.answers] == [(2, ErrorKind.OVERLOADED)]


def test_a_name_without_its_image_is_refused_once_that_is_gone() -> None:
    bench = Bench()
    bench.ask(FRONTENDS[0], 1, [source(b"a", uuid="cat")], [b"a"])
    bench.finish()
    bench.ask(FRONTENDS[0], 2, [source(b"", uuid="cat")], [b"a"])
    assert not bench.answers[-1].error
    bench.vanished |= bench.files.keys()
    bench.files.clear()
    bench.event(Listed(frozenset()))
    bench.ask(FRONTENDS[0], 3, [source(b"", uuid="cat"), source(b"b")], [b"a", b"b"])
    assert FORGOTTEN in bench.answers[-1].error
    bench.finish()
    assert array("i", [answer.handle for answer in bench.answers]).tolist() == [1, 2, 3]
