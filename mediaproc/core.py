"""The media process's pure core: who waits for which items, which items are known, and which files stay (docs/media.md).

A source becomes an item in two steps, each done elsewhere: its bytes are gathered (decoded, read or fetched), and an item is made of
them. Whoever sends the same bytes meanwhile, or later, waits for the same item, or has it at once. `handle(event, now)` answers with
effects; io.py calls it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec.structs import replace

from meshlm.mediaproc.cache import FileCache
from meshlm.mediaproc.events import (
    TOO_LARGE,
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
from meshlm.mediaproc.holds import Holder
from meshlm.mediaproc.turns import Turns
from meshlm.protocol.counts import MEDIA
from meshlm.protocol.edges.media import HoldMedia, MediaGone, MediaRead, MediaSource, ReadMedia, ReleaseMedia
from meshlm.protocol.media import MediaItem
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Incarnation, Role
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick

MAX_KNOWN = 16_384  # items that are remembered, some 4 KB each
MAX_WAITING_BYTES = 256 << 20  # of sources that no item is made of yet, beyond which new ones get 503
Asker = tuple[Identity, Handle]
FULL = Refusal("too many images, videos and sounds wait to be read; try again", ErrorKind.OVERLOADED)
GONE = Refusal("its file went while others were read; send the request again", ErrorKind.OVERLOADED)
NO_ROOM = Refusal(
    "the media of running requests take all shared memory that they may (--mm-processor-cache-gb); try again",
    ErrorKind.OVERLOADED,
)
TOO_MUCH = Refusal("the request's media take more shared memory than all together may (--mm-processor-cache-gb)")
BEFORE = Holder(Identity(Role.MEDIA), Incarnation(0))  # of what earlier incarnations left, until its holders say so
FORGOTTEN = "is not known, or not any more; send it with its data"


@dataclass(slots=True)
class Asked:
    """A ReadMedia that is not answered yet."""

    incarnation: Incarnation
    sources: tuple[MediaSource, ...]
    items: dict[int, MediaItem] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    """A source on its way, and who waits for its item: with each the number of the source there. The same handle may be another
    question by then, of another incarnation, so the question itself is kept, too."""

    source: MediaSource
    waiters: list[tuple[Asker, Asked, int]]
    num_bytes: int = 0
    key: bytes = b""  # once its bytes are there
    data: bytes = b""  # these, until its turn comes


class MediaCore:
    """refusal: why no item can be made at all; "" where it can."""

    def __init__(self, max_bytes: int, folder: str, refusal: str = "", at_once: int = 4) -> None:
        """at_once: items that are made at a time."""
        self.counts = Counts(MEDIA)
        self.turns = Turns(at_once)
        self.files, self._folder, self._refusal = FileCache(max_bytes), folder, refusal
        self.asked: dict[Asker, Asked] = {}
        self.jobs: dict[int, Job] = {}
        self._next_job = 0
        self._by_key: dict[bytes, int] = {}  # the job that makes the item of these bytes
        self._known: OrderedDict[bytes, MediaItem] = (
            OrderedDict()
        )  # by key, or by the client's name with b"uuid" before it
        self.num_waiting_bytes = 0
        self._now = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._now = now
        return [*self._heard(event), *self._go_on()]

    def _heard(self, event: Event) -> list[Effect]:
        match event:
            case Received(message=ReadMedia() as read):
                return self._read(event.sender, event.incarnation, read)
            case Received(message=ReleaseMedia(handle=handle)):
                self._release((event.sender, handle), event.incarnation)
            case Received(message=HoldMedia() as said):
                self.files.say(Holder(event.sender, event.incarnation), said, self._now)
                needed = {digest for one in said.holds for digest in one.digests}.union(said.others)
                gone = tuple(sorted(digest for digest in needed if digest not in self.files))
                return [Send(event.sender, MediaGone(gone))] if gone else []
            case PeerLost():
                lost = event.identity, event.incarnation
                for asker in [asker for asker, asked in self.asked.items() if (asker[0], asked.incarnation) == lost]:
                    self._release(asker, event.incarnation)
            case Found(files=files):
                return self._found(files)
            case Listed(digests=digests):
                self.files.keep_only(digests)
            case Gathered():
                return self._gathered(event)
            case Made():
                return self._made(event)
            case Skipped(effect=effect):  # somebody may have come for it since
                return [effect] if self.is_wanted(effect.job) else self._dropped(effect.job)
            case Tick():
                self.files.expire(self._now)
                over = [(job, None) for job in self.turns.waiting() if not self.is_wanted(job)]
                late = [(job, NO_ROOM) for job in self.turns.overdue(self._now)]
                return [effect for job, why in over + late if job in self.jobs for effect in self._end(job, why)]
        return []

    def _found(self, files: tuple[tuple[bytes, int], ...]) -> list[Effect]:
        """Takes the files of earlier incarnations over, as far as there is room. Who holds them says so soon."""
        effects: list[Effect] = []
        for number, (digest, size) in enumerate(files):
            if self.files.num_bytes + size > self.files.max_bytes or self.files.add(digest, size) is None:
                effects.append(Drop(digest.hex()))
            else:
                self.files.hold(BEFORE, Handle(number), digest, self._now)
        return effects

    def _release(self, asker: Asker, incarnation: Incarnation) -> None:
        """This question is over, and its files are held no longer."""
        if (asked := self.asked.get(asker)) is not None and asked.incarnation == incarnation:
            del self.asked[asker]
        self.files.release(Holder(asker[0], incarnation), asker[1])

    def is_wanted(self, job: int) -> bool:
        """Whether somebody waits for this job still. Threads ask before they begin."""
        found = self.jobs.get(job)
        return found is not None and any(self.asked.get(asker) is asked for asker, asked, _ in found.waiters)

    # --- questions ---

    def _read(self, sender: Identity, incarnation: Incarnation, read: ReadMedia) -> list[Effect]:
        asker = sender, read.handle
        size = sum(len(source.data) for source in read.sources)
        self.counts.add("media_queries", amount=len(read.sources))
        if self._refusal:
            return [self._refused(asker, read.sources[0], Refusal(self._refusal))]
        if self.num_waiting_bytes and self.num_waiting_bytes + size > MAX_WAITING_BYTES:
            return [self._refused(asker, read.sources[0], FULL)]
        asked = self.asked[asker] = Asked(incarnation, read.sources)
        effects: list[Effect] = []
        for number, source in enumerate(read.sources):
            if source.uuid and not source.data and not source.url:
                known = self._item(b"uuid" + source.uuid.encode())
                if known is None:
                    self._release(asker, incarnation)
                    return [*effects, self._refused(asker, source, Refusal(f"the uuid {FORGOTTEN}"))]
                self._have(asker, asked, number, known)
                continue
            self._next_job += 1
            self.jobs[self._next_job] = Job(source, [(asker, asked, number)], len(source.data))
            self.num_waiting_bytes += len(source.data)
            effects.append(Gather(self._next_job, source))
        return [*effects, *self._answered(asker)]

    def _have(self, asker: Asker, asked: Asked, number: int, item: MediaItem) -> None:
        """The question has this item, whose file it holds."""
        asked.items[number] = item
        self.files.hold(Holder(asker[0], asked.incarnation), asker[1], item.digest, self._now)

    def _item(self, key: bytes) -> MediaItem | None:
        """A known item whose file is there."""
        item = self._known.get(key)
        if item is None or item.digest not in self.files:
            self._known.pop(key, None)
            return None
        self._known.move_to_end(key)
        self.counts.add("media_hits")
        return item

    def _remember(self, key: bytes, item: MediaItem) -> None:
        self._known[key] = item
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _refused(self, asker: Asker, source: MediaSource, refusal: Refusal) -> Send:
        self.counts.add("media_refused", refusal.kind.value)
        text = f"{source.where}: {refusal.text}"
        return Send(asker[0], MediaRead(asker[1], (), refusal.kind, text, source.param))

    def _answered(self, asker: Asker) -> list[Effect]:
        """The answer, where all its items are there. Since the first of them came, files may have vanished and its lease ended."""
        asked = self.asked[asker]
        if len(asked.items) < len(asked.sources):
            return []
        for number, item in sorted(asked.items.items()):
            if not self.files.hold(Holder(asker[0], asked.incarnation), asker[1], item.digest, self._now):
                self._release(asker, asked.incarnation)
                return [self._refused(asker, asked.sources[number], GONE)]
        del self.asked[asker]
        return [Send(asker[0], MediaRead(asker[1], tuple(asked.items[number] for number in range(len(asked.sources)))))]

    # --- what comes of jobs ---

    def _gathered(self, event: Gathered) -> list[Effect]:
        job = self.jobs.get(event.job)
        if job is None or job.key:
            return []  # it was said before
        if event.refusal is not None:
            return self._end(event.job, event.refusal)
        self.num_waiting_bytes += len(event.data) - job.num_bytes
        job.num_bytes, job.key = len(event.data), event.key
        if (known := self._item(event.key)) is not None:
            return self._end(event.job, known)
        if (other := self._by_key.get(event.key)) is not None:  # the same is on its way
            waiters = job.waiters
            self._end(event.job, None)
            self.jobs[other].waiters += waiters
            return []
        if self.num_waiting_bytes > 2 * MAX_WAITING_BYTES:  # of what was fetched
            return self._end(event.job, FULL)
        self._by_key[event.key] = event.job
        job.data, job.source = event.data, replace(job.source, data=b"")
        self.turns.wait(event.job, self._now)
        return []

    def _made(self, event: Made) -> list[Effect]:
        job = self.jobs.get(event.job)
        if job is None or not self.turns.is_being_made(event.job):  # it was said before
            return [Drop(event.part)] if event.part else []
        if event.item is None:
            assert event.refusal is not None
            return self._end(event.job, event.refusal)
        self.turns.made(event)
        return self._end(event.job, TOO_LARGE) if event.num_bytes > self.files.max_bytes else []

    def _go_on(self) -> list[Effect]:
        """Room for what is made, in its order, and then the next turns."""
        effects: list[Effect] = []
        while (made := self.turns.first_made()) is not None:
            if (done := self._placed(made)) is None:
                effects += self._too_much(made)
                if made is self.turns.first_made():
                    break
            else:
                effects += done
        self.turns.note_full(self._now, full=made is not None)
        while (number := self.turns.next()) is not None:
            job = self.jobs[number]
            if not self.is_wanted(number):
                effects += self._dropped(number)
                continue
            effects.append(Make(number, job.source, job.data))
            job.data = b""
        return effects

    def _placed(self, made: Made) -> list[Effect] | None:
        """The item gets room and whoever waits for it gets the item. None: there is no room."""
        job, item = self.jobs[made.job], made.item
        assert item is not None
        effects: list[Effect] = []
        if item.digest not in self.files:  # other bytes may give the same tensors
            if (going := self.files.add(item.digest, made.num_bytes)) is None:
                return None if self.is_wanted(made.job) else self._dropped(made.job)
            self.counts.add("media_evicted", amount=len(going))
            effects += [*(Drop(digest.hex()) for digest in going), Keep(made.part, item.digest)]
            self.turns.keep(made.job)
        item = replace(item, path=f"{self._folder}/{item.digest.hex()}")
        self._remember(job.key, item)
        return [*effects, *self._end(made.job, item)]

    def _too_much(self, made: Made) -> list[Effect]:
        """Refuses those for whom there will never be room, as their own other items take it."""
        effects: list[Effect] = []
        for asker, asked, place in self.jobs[made.job].waiters:
            own = sum(map(self.files.size, {item.digest for item in asked.items.values()}))
            if self.asked.get(asker) is asked and own + made.num_bytes > self.files.max_bytes:
                self._release(asker, asked.incarnation)
                effects.append(self._refused(asker, asked.sources[place], TOO_MUCH))
        return effects if self.is_wanted(made.job) else effects + self._dropped(made.job)

    def _dropped(self, number: int) -> list[Effect]:
        """Nobody waits for this job."""
        return self._end(number, None) if number in self.jobs else []

    def _end(self, number: int, found: MediaItem | Refusal | None) -> list[Effect]:
        """The job is over: whoever waits for it has an item more, or is refused. None: nobody waits for it, or for another job."""
        job = self.jobs.pop(number)
        self.num_waiting_bytes -= job.num_bytes
        if self._by_key.get(job.key) == number:
            del self._by_key[job.key]
        part = self.turns.end(number)
        effects: list[Effect] = [Drop(part)] if part else []
        for asker, asked, place in job.waiters if found is not None else ():
            if self.asked.get(asker) is not asked:
                continue
            if isinstance(found, Refusal):
                self._release(asker, asked.incarnation)
                effects.append(self._refused(asker, asked.sources[place], found))
                continue
            assert found is not None
            if uuid := asked.sources[place].uuid:
                self._remember(b"uuid" + uuid.encode(), found)
            self._have(asker, asked, place, found)
            effects += self._answered(asker)
        return effects

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.files.check()
        self.turns.check({number for number, job in self.jobs.items() if job.key})
        assert self.num_waiting_bytes == sum(job.num_bytes for job in self.jobs.values())
        assert all(self.jobs[number].key == key for key, number in self._by_key.items())
        for asker, asked in self.asked.items():
            waits = {place for job in self.jobs.values() for _, one, place in job.waiters if one is asked}
            assert waits | asked.items.keys() == set(range(len(asked.sources))), asker
