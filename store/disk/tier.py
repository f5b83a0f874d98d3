"""The second tier's pure core: which keys have files, what is written, read and deleted next, and whether reading is worth it.

What the first tier stores is written behind it, in the order of storing, while it is there; one file at a time, and those that are gone
before their turn are left out. Files are read for a scheduler that asks for them, into slots of the first tier. Owned by the store's
core, which answers the scheduler.

A folder may be shared by several meshes. Files of namespaces that no rank of this mesh has opened are other meshes': they are left
alone, but their bytes count. What others have added or deleted is seen with the next list.

The tier pauses when its disk fails (it is full, read only, not there): one line says so, and all goes on without it until it is tried
again.
"""

from collections import OrderedDict, deque

from meshlm.protocol.edges.kv import NAMESPACE_BYTES
from meshlm.runtime.process.counts import Counts
from meshlm.store.disk.content import HEADER_BYTES
from meshlm.store.disk.events import (
    DeleteFile,
    DiskEffect,
    FileRead,
    FileWritten,
    Listed,
    ListFiles,
    ReadFile,
    WriteFile,
)
from meshlm.store.eviction import Eviction
from meshlm.store.memory import Memory, State, Stored

MOST_READS = 4  # at a time
FIRST_RATE = 500e6  # bytes a second, before any file was read, and when the last one was long ago
RATE_S = 60.0
ANSWER_S = 1.5  # that reading may take: schedulers wait for 2 s
LIST_S = 300.0  # between two lists
PAUSE_S = 30.0


class Tier:
    """`memory` is the first tier, max_bytes the most that files may have, other meshes' too; None: what the disk has room for."""

    def __init__(self, memory: Memory, counts: Counts, max_bytes: int | None) -> None:
        self._memory, self._counts, self._max_bytes = memory, counts, max_bytes
        self.capacity: int | None = max_bytes
        self.sizes: dict[bytes, int] = {}  # bytes of the files of this mesh's namespaces, by key
        self._namespaces: set[bytes] = set()
        self._others: dict[bytes, dict[bytes, int]] = {}  # the files of other namespaces
        self._others_bytes = 0
        self._eviction = Eviction()
        self.reading: dict[bytes, Stored] = {}  # slots that are being filled
        self._to_read: deque[Stored] = deque()
        self._num_reads = 0  # that are under way
        self._rate, self._measured_at = FIRST_RATE, -RATE_S
        self._to_write: OrderedDict[bytes, None] = OrderedDict()
        self.writing: Stored | None = None  # in slots of the first tier
        self._list_at = 0.0
        self._listing: set[bytes] | None = None  # keys that were deleted since the list was asked for
        self.failure = ""
        self._paused_until = 0.0
        self.effects: list[DiskEffect] = []  # for io.py, which takes them

    # --- what there is ---

    def open(self, namespace: bytes) -> None:
        """A rank of this mesh has these pages."""
        if namespace not in self._namespaces:
            self._namespaces.add(namespace)
            for key, size in self._others.pop(namespace, {}).items():
                self._others_bytes -= size
                self._add(key, size)

    def has(self, key: bytes, width: int) -> bool:
        """Whether there is a file with that many pages. One of another size was cut off, and is deleted."""
        if (size := self.sizes.get(key)) is None or self.failure:
            return False
        if size == self._file_bytes(width):
            return True
        if key not in self.reading and not (self.writing and self.writing.key == key):
            self._count_bad("truncated")
            self._delete(key)
        return False

    def _file_bytes(self, num_pages: int) -> int:
        return HEADER_BYTES + num_pages * self._memory.slot_bytes

    def listed(self, event: Listed, now: float) -> None:
        """The folder's content as of the moment at which all writes before it had been done."""
        deleted, self._listing = self._listing or set(), None
        self._list_at = now + LIST_S
        if event.failure:
            self._fail(event.failure, now)
            return
        self._others, self._others_bytes = {}, 0
        for key, size in event.sizes.items():
            if key[:NAMESPACE_BYTES] not in self._namespaces:
                self._others.setdefault(key[:NAMESPACE_BYTES], {})[key] = size
                self._others_bytes += size
            elif key not in deleted and key not in self.sizes:
                self._add(key, size)
        for key in [key for key in self.sizes if key not in event.sizes]:
            self._remove(key)
        if self._max_bytes is None and event.free_bytes is not None:
            self.capacity = self.num_bytes + event.free_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, other meshes' too."""
        return self._eviction.size + self._others_bytes

    def _add(self, key: bytes, size: int) -> None:
        self.sizes[key] = size
        self._eviction.add(key, size)

    def _remove(self, key: bytes) -> None:
        del self.sizes[key]
        self._eviction.remove(key)

    def _delete(self, key: bytes) -> None:
        self._remove(key)
        self._forget(key)
        self.effects.append(DeleteFile(key))

    def _forget(self, key: bytes) -> None:
        """A list that is under way may still have it."""
        if self._listing is not None:
            self._listing.add(key)

    def _count_bad(self, why: str) -> None:
        self._counts.add("kv_store_bad_files", why)

    # --- reading ---

    def num_worth(self, num_bytes: int, count: int, compute_s: float, now: float) -> int:
        """How many of `count` keys, of so many bytes each, are worth reading: computing one takes compute_s (0: nobody knows)."""
        if now - self._measured_at > RATE_S:
            self._rate = FIRST_RATE
        waiting = sum(len(stored.slots) for stored in self.reading.values()) * self._memory.slot_bytes
        most = min(count, int((ANSWER_S * self._rate - waiting) // num_bytes))
        if most < 1:
            return 0
        return most if not compute_s or (waiting + most * num_bytes) / self._rate <= most * compute_s else 0

    def read(self, key: bytes, width: int) -> Stored | None:
        """Begins to read a file that is there. None: there are no slots for it."""
        if (stored := self._memory.reserve(key, width)) is not None:
            self.reading[key] = stored
            self._to_read.append(stored)
            self._eviction.hit(key)
        return stored

    def was_read(self, event: FileRead, now: float) -> Stored:
        """The slots of a file that was read; the caller says what becomes of them."""
        stored = self.reading.pop(event.key)
        num_bytes = self._file_bytes(len(stored.slots))
        if not event.failure:
            sample = num_bytes * self._num_reads / max(event.duration_s, 1e-6)
            self._rate = sample if now - self._measured_at > RATE_S else 0.9 * self._rate + 0.1 * sample
            self._measured_at = now
            self._counts.add("kv_store_read_bytes", "disk", num_bytes)
        elif event.is_bad or event.is_gone:
            if event.is_bad:
                self._count_bad(event.failure)
            if event.key in self.sizes:
                self._remove(event.key)
            self._forget(event.key)
        else:
            self._fail(event.failure, now)
        self._num_reads -= 1
        return stored

    # --- writing ---

    def offer(self, stored: Stored) -> None:
        """The first tier has it now."""
        if stored.key not in self.sizes:
            self._to_write[stored.key] = None
            if len(self._to_write) > len(self._memory.keys):  # some are gone
                self._to_write.popitem(last=False)

    def was_written(self, event: FileWritten, now: float) -> None:
        assert self.writing is not None
        self._memory.leave(self.writing)
        self.writing = None
        if event.failure:
            self._fail(event.failure, now)
            self._to_write[event.key] = None
            return
        self.failure = ""
        if event.key not in self.sizes:
            self._add(event.key, event.num_bytes)
        self._counts.add("kv_store_stored", "disk")
        self._counts.add("kv_store_written_bytes", "disk", event.num_bytes)

    @property
    def is_flushed(self) -> bool:
        """Whether all that can be written is."""
        return self.writing is None and (not self._to_write or bool(self.failure))

    def _fail(self, why: str, now: float) -> None:
        self.failure, self._paused_until = why, now + PAUSE_S

    def go_on(self, now: float) -> None:
        """Begins what can begin now. Called after every event."""
        if self.failure and now >= self._paused_until:
            self.failure, self._list_at = "", 0.0  # what is there is looked at anew
        while self._to_read and self._num_reads < MOST_READS:
            stored = self._to_read.popleft()
            self._num_reads += 1
            self.effects.append(ReadFile(stored.key, stored.slots, self._memory.slot_bytes))
        if self.failure:
            return
        if self._listing is None and now >= self._list_at:
            self._listing = set()
            self.effects.append(ListFiles())
        while self._list_at and self.writing is None and self._to_write:
            self._write_next(now)

    def _write_next(self, now: float) -> None:
        key, _ = self._to_write.popitem(last=False)
        stored = self._memory.keys.get(key)
        if stored is None or stored.state is not State.STORED or key in self.sizes:
            return
        if not self._make_room(self._file_bytes(len(stored.slots))):
            self._to_write.clear()
            others = f", and other meshes' have {self._others_bytes}" if self._others_bytes else ""
            self._fail(f"files may have {self.capacity} bytes{others}: there is no room for one more", now)
            return
        self._memory.use(stored)
        self.writing = stored
        self.effects.append(WriteFile(key, stored.slots, self._memory.slot_bytes))

    def _make_room(self, num_bytes: int) -> bool:
        if self.capacity is None:
            return True
        if self._others_bytes + num_bytes > self.capacity:
            return False
        while self.num_bytes + num_bytes > self.capacity:
            if (key := self._eviction.evict(self.reading.__contains__)) is None:
                return False
            del self.sizes[key]
            self._forget(key)
            self.effects.append(DeleteFile(key))
            self._counts.add("kv_store_evicted", "disk")
        return True

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self._eviction.check()
        assert self._eviction.size == sum(self.sizes.values())
        assert all(key in self._eviction for key in self.sizes)
        assert len(self._eviction) == len(self.sizes)
        assert self._others_bytes == sum(sum(sizes.values()) for sizes in self._others.values())
        assert self._num_reads + len(self._to_read) == len(self.reading)
        assert self._num_reads <= MOST_READS
        assert not self._namespaces & self._others.keys()
        for key, stored in self.reading.items():
            assert self._memory.keys[key] is stored
            assert stored.state is State.WRITING
