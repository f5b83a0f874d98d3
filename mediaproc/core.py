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
from meshlm.protocol.counts import MEDIA
from meshlm.protocol.edges.media import CancelMedia, MediaGone, MediaRead, MediaSource, ReadMedia, RenewMedia
from meshlm.protocol.media import MediaItem
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Incarnation
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.events import PeerLost, Received, Send

MAX_KNOWN = 16_384  # items that are remembered, some 4 KB each
MAX_WAITING_BYTES = 256 << 20  # of sources that no item is made of yet, beyond which new ones get 503
Asker = tuple[Identity, Handle]
FULL = Refusal("too many images, videos and sounds wait to be read; try again", ErrorKind.OVERLOADED)
GONE = Refusal("its file went while others were read; send the request again", ErrorKind.OVERLOADED)
NO_ROOM = Refusal(
    "the media of running requests take all shared memory that they may (--mm-processor-cache-gb); try again",
    ErrorKind.OVERLOADED,
)
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


class MediaCore:
    """refusal: why no item can be made at all; "" where it can."""

    def __init__(self, max_bytes: int, folder: str, refusal: str = "") -> None:
        self.counts = Counts(MEDIA)
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
        match event:
            case Received(message=ReadMedia() as read):
                return self._read(event.sender, event.incarnation, read, now)
            case Received(message=CancelMedia() as cancel):
                self.asked.pop((event.sender, cancel.handle), None)
            case Received(message=RenewMedia() as renew):
                gone = tuple(digest for digest in renew.digests if not self.files.lease(digest, now))
                return [Send(event.sender, MediaGone(gone))] if gone else []
            case PeerLost():
                lost = event.identity, event.incarnation
                here = [asker for asker, asked in self.asked.items() if (asker[0], asked.incarnation) == lost]
                for asker in here:
                    del self.asked[asker]
            case Found(files=files):
                return [Drop(digest.hex()) for digest, size in files if self.files.add(digest, size, now) is None]
            case Listed(digests=digests):
                self.files.keep_only(digests)
            case Gathered():
                return self._gathered(event, now)
            case Made():
                return self._made(event, now)
            case Skipped(effect=effect):  # somebody may have come for it since
                return [effect] if self.is_wanted(effect.job) else self._dropped(effect.job)
        return []

    def is_wanted(self, job: int) -> bool:
        """Whether somebody waits for this job still. Threads ask before they begin."""
        found = self.jobs.get(job)
        return found is not None and any(self.asked.get(asker) is asked for asker, asked, _ in found.waiters)

    # --- questions ---

    def _read(self, sender: Identity, incarnation: Incarnation, read: ReadMedia, now: float) -> list[Effect]:
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
                known = self._item(b"uuid" + source.uuid.encode(), now)
                if known is None:
                    del self.asked[asker]
                    return [*effects, self._refused(asker, source, Refusal(f"the uuid {FORGOTTEN}"))]
                asked.items[number] = known
                continue
            self._next_job += 1
            self.jobs[self._next_job] = Job(source, [(asker, asked, number)], len(source.data))
            self.num_waiting_bytes += len(source.data)
            effects.append(Gather(self._next_job, source))
        return [*effects, *self._answered(asker)]

    def _item(self, key: bytes, now: float) -> MediaItem | None:
        """A known item whose file is there; it has a lease now."""
        item = self._known.get(key)
        if item is None or not self.files.lease(item.digest, now):
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
        """The answer, where all its items are there. The first may have waited for the last for longer than its lease."""
        asked = self.asked[asker]
        if len(asked.items) < len(asked.sources):
            return []
        del self.asked[asker]
        for number, item in sorted(asked.items.items()):
            if not self.files.lease(item.digest, self._now):
                return [self._refused(asker, asked.sources[number], GONE)]
        return [Send(asker[0], MediaRead(asker[1], tuple(asked.items[number] for number in range(len(asked.sources)))))]

    # --- what comes of jobs ---

    def _gathered(self, event: Gathered, now: float) -> list[Effect]:
        job = self.jobs.get(event.job)
        if job is None or job.key:
            return []  # it was said before
        if event.refusal is not None:
            return self._end(event.job, event.refusal)
        self.num_waiting_bytes += len(event.data) - job.num_bytes
        job.num_bytes, job.key = len(event.data), event.key
        if (known := self._item(event.key, now)) is not None:
            return self._end(event.job, known)
        if (other := self._by_key.get(event.key)) is not None:  # the same is on its way
            waiters = job.waiters
            self._end(event.job, None)
            self.jobs[other].waiters += waiters
            return []
        if self.num_waiting_bytes > 2 * MAX_WAITING_BYTES:  # of what was fetched
            return self._end(event.job, FULL)
        self._by_key[event.key] = event.job
        return [Make(event.job, replace(job.source, data=b""), event.data)]

    def _made(self, event: Made, now: float) -> list[Effect]:
        job = self.jobs.get(event.job)
        if job is None or not job.key:  # it was said before
            return [Drop(event.part)] if event.part else []
        if (item := event.item) is None:
            assert event.refusal is not None
            return self._end(event.job, event.refusal)
        effects: list[Effect] = []
        if self.files.lease(item.digest, now):
            effects.append(Drop(event.part))  # other bytes, the same tensors
        elif (going := self.files.add(item.digest, event.num_bytes, now)) is None:
            return [Drop(event.part), *self._end(event.job, NO_ROOM)]
        else:
            self.counts.add("media_evicted", amount=len(going))
            effects += [*(Drop(digest.hex()) for digest in going), Keep(event.part, item.digest)]
        item = replace(item, path=f"{self._folder}/{item.digest.hex()}")
        self._remember(job.key, item)
        return [*effects, *self._end(event.job, item)]

    def _dropped(self, number: int) -> list[Effect]:
        """Nobody waits for this job."""
        return self._end(number, None) if number in self.jobs else []

    def _end(self, number: int, found: MediaItem | Refusal | None) -> list[Effect]:
        """The job is over: whoever waits for it has an item more, or is refused. None: nobody waits for it, or for another job."""
        job = self.jobs.pop(number)
        self.num_waiting_bytes -= job.num_bytes
        if self._by_key.get(job.key) == number:
            del self._by_key[job.key]
        effects: list[Effect] = []
        for asker, asked, place in job.waiters if found is not None else ():
            if self.asked.get(asker) is not asked:
                continue
            if isinstance(found, Refusal):
                del self.asked[asker]
                effects.append(self._refused(asker, asked.sources[place], found))
                continue
            assert found is not None
            if uuid := asked.sources[place].uuid:
                self._remember(b"uuid" + uuid.encode(), found)
            asked.items[place] = found
            effects += self._answered(asker)
        return effects

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.files.check()
        assert self.num_waiting_bytes == sum(job.num_bytes for job in self.jobs.values())
        assert all(self.jobs[number].key == key for key, number in self._by_key.items())
        for asker, asked in self.asked.items():
            waits = {place for job in self.jobs.values() for _, one, place in job.waiters if one is asked}
            assert waits | asked.items.keys() == set(range(len(asked.sources))), asker
