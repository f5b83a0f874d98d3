"""Which files of items there are, how many bytes they have, and which of them may go. Pure; owned by core.py.

A file that somebody holds stays: a request may need it again, after a preemption or a worker's death. Of the others the one that was
used least recently goes first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from meshlm.mediaproc.holds import Holder, Holds
from meshlm.protocol.edges.media import HoldMedia
from meshlm.protocol.wire.ids import Handle


class FileCache:
    """`max_bytes` bound the files that are held, too."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.num_held_bytes = max_bytes, 0, 0
        self._holds = Holds()
        self._held: dict[bytes, int] = {}  # bytes
        self._free: OrderedDict[bytes, int] = OrderedDict()  # bytes; used last, last

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held or digest in self._free

    def __len__(self) -> int:
        return len(self._held) + len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def size(self, digest: bytes) -> int:
        """Bytes of a file; 0 where it is not there."""
        return self._held.get(digest, self._free.get(digest, 0))

    def hold(self, holder: Holder, handle: Handle, digest: bytes, now: float) -> bool:
        """Whether the file is there; it stays while that is held."""
        self._holds.hold(holder, handle, digest, now)
        self._note_held((digest,))
        return digest in self._held

    def release(self, holder: Holder, handle: Handle) -> None:
        self._note_free(self._holds.release(holder, handle))

    def say(self, holder: Holder, said: HoldMedia, now: float) -> None:
        """What a holder says that it holds."""
        freed = self._holds.say(holder, said.holds, said.after, said.through, now)
        self._note_held(digest for one in said.holds for digest in one.digests)
        self._note_free(freed)

    def expire(self, now: float) -> None:
        """Ends the holds of those that have not been heard of for too long."""
        self._note_free(self._holds.expire(now))

    def _note_held(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if (size := self._free.pop(digest, None)) is not None:
                self._held[digest] = size
                self.num_held_bytes += size

    def _note_free(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if (size := self._held.pop(digest, None)) is not None:
                self._free[digest] = size
                self.num_held_bytes -= size

    def add(self, digest: bytes, size: int) -> list[bytes] | None:
        """Takes a new file; the files that go for it. None: there is no room, and it is not taken."""
        if self.num_held_bytes + size > self.max_bytes:
            return None
        going = []
        while self.num_bytes + size > self.max_bytes:
            other, other_size = self._free.popitem(last=False)
            self.num_bytes -= other_size
            going.append(other)
        self._free[digest] = size
        self.num_bytes += size
        if self._holds.num[digest]:
            self._note_held((digest,))
        return going

    def keep_only(self, digests: frozenset[bytes]) -> None:
        """Forgets the other files, held or not: they are not there any more."""
        for digest in self._held.keys() - digests:
            size = self._held.pop(digest)
            self.num_bytes -= size
            self.num_held_bytes -= size
        for digest in self._free.keys() - digests:
            self.num_bytes -= self._free.pop(digest)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self._holds.check()
        assert not self._held.keys() & self._free.keys()
        assert self._held.keys() <= self._holds.num.keys(), "held by nobody"
        assert not self._free.keys() & self._holds.num.keys(), "what is held may go"
        assert self.num_held_bytes == sum(self._held.values())
        assert self.num_bytes == self.num_held_bytes + sum(self._free.values()) <= self.max_bytes
