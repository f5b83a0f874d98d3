"""Who holds which files: pure; owned by cache.py.

A holder is one incarnation of a frontend or a detokenizer, and it holds by handle: of its question or of its request. What a holder has
not said again for LEASE_S is held no longer. Files may be held that are not there: they may come back.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from meshlm.protocol.edges.media import LEASE_S, Hold
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation


class Holder(NamedTuple):
    """A process that holds files."""

    identity: Identity
    incarnation: Incarnation


class Holds:
    """`num` counts the holds of each digest."""

    def __init__(self) -> None:
        self.num: Counter[bytes] = Counter()
        self._until: dict[Holder, float] = {}
        self._by_handle: dict[Holder, dict[Handle, set[bytes]]] = {}

    def hold(self, holder: Holder, handle: Handle, digest: bytes, now: float) -> None:
        """Once for each handle, however often it is said."""
        self._until[holder] = now + LEASE_S
        held = self._by_handle.setdefault(holder, {}).setdefault(handle, set())
        if digest not in held:
            held.add(digest)
            self.num[digest] += 1

    def release(self, holder: Holder, handle: Handle) -> list[bytes]:
        """The digests that nobody holds any more."""
        by_handle = self._by_handle.get(holder, {})
        freed = self._freed(by_handle.pop(handle, set()))
        if not by_handle:
            self._by_handle.pop(holder, None)
            self._until.pop(holder, None)
        return freed

    def say(self, holder: Holder, holds: Iterable[Hold], after: int, through: int, now: float) -> list[bytes]:
        """These are all holds of this holder in that range. The digests that nobody holds any more."""
        said = {one.handle for one in holds}
        for one in holds:
            for digest in one.digests:
                self.hold(holder, one.handle, digest, now)
        if holder in self._until:
            self._until[holder] = now + LEASE_S
        over = [one for one in self._by_handle.get(holder, ()) if after < one <= through and one not in said]
        return [digest for handle in over for digest in self.release(holder, handle)]

    def expire(self, now: float) -> list[bytes]:
        """The digests that nobody holds any more, as some holders have not been heard of for too long."""
        over = [holder for holder, until in self._until.items() if until <= now]
        found = [(holder, handle) for holder in over for handle in list(self._by_handle[holder])]
        return [digest for holder, handle in found for digest in self.release(holder, handle)]

    def _freed(self, digests: set[bytes]) -> list[bytes]:
        freed = []
        for digest in digests:
            self.num[digest] -= 1
            if not self.num[digest]:
                del self.num[digest]
                freed.append(digest)
        return freed

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self._until.keys() == self._by_handle.keys()
        assert all(self._by_handle.values()), "a holder that holds nothing"
        each = [digest for held in self._by_handle.values() for digests in held.values() for digest in digests]
        assert Counter(each) == self.num
