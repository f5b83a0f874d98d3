"""A media process's core beside threads that do what a test says, with a check after each event."""

from collections.abc import Sequence

from meshlm.mediaproc.core import MediaCore
from meshlm.mediaproc.events import Drop, Effect, Event, Gather, Gathered, Keep, Made, Make, Refusal, Skipped
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
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, Role
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
