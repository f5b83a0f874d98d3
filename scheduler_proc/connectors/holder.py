"""Leases that this rank gives: to other ranks that read its cached pages, and to whoever goes on with a prompt that was computed here.

Pure; owned by transfers.py, for one session with the workers. A lease ends with EndLease, with the link to its reader, or LEASE_S after
it began. A reader may go on reading for a moment then: it is told that the lease had not held, and trusts nothing of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshlm.protocol.edges.kv import KEY_BYTES, NOT_HERE, FindPages, LeaseEnded, PagesFound
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import BlockId, Identity
from meshlm.scheduler_proc.connectors.session import LEASE_NS, PageSession
from meshlm.scheduler_proc.connectors.settled import Settled
from meshlm.scheduler_proc.kv.lease import Lease


@dataclass(slots=True, eq=False)
class Reading:
    """A lease of another rank."""

    lease: Lease
    until_ns: int
    keys: frozenset[bytes]
    answer: PagesFound


@dataclass(slots=True, eq=False)
class Left:
    """The KV of a prompt whose request goes on elsewhere."""

    lease: Lease
    until_ns: int
    key: bytes  # of its last block


class Holder:
    """The leases of one session."""

    def __init__(self, session: PageSession, settled: Settled) -> None:
        self._session, self._settled = session, settled
        self._readings: dict[tuple[Identity, int], Reading] = {}
        self._left: list[Left] = []

    def find(self, reader: Identity, asked: FindPages, now_ns: int) -> None:
        """Another rank asks for pages."""
        session, number = self._session, asked.number
        known = self._readings.get((reader, number))
        if known is not None:
            session.send(reader, known.answer)
            return
        pages: list[int] = []
        some: list[int] = []
        keys = [asked.keys[at : at + KEY_BYTES] for at in range(0, len(asked.keys), KEY_BYTES)]
        can_read = bool(session.memory) and asked.namespace == session.namespace and len(keys) == len(asked.widths)
        for key, width in zip(keys, asked.widths, strict=True) if can_read else ():
            found = self._settled.find(key)
            pages += found if len(found) == width else [NOT_HERE] * width
            some += found if len(found) == width else ()
        if not some:
            session.send(reader, PagesFound(number, b""))
            return
        answer = PagesFound(number, pack_i32(pages), session.memory)
        lease = session.pool.lease(dict.fromkeys(map(BlockId, some)))
        self._readings[reader, number] = Reading(lease, now_ns + LEASE_NS, frozenset(keys), answer)
        session.send(reader, answer)

    def end(self, reader: Identity, number: int) -> None:
        """A reader is done. Whoever asked for what a prompt has left has it now."""
        reading = self._readings.pop((reader, number), None)
        self._session.send(reader, LeaseEnded(number, reading is not None))
        if reading is not None:
            self._session.pool.end_lease(reading.lease)
            taken = next((left for left in self._left if left.key in reading.keys), None)
            if taken is not None:
                self._end_left(taken)

    def leave(self, hashes: Sequence[bytes], until_ns: int) -> None:
        """Keeps what a request that goes on elsewhere behind these blocks needs, as far as it is cached."""
        prefixes, pool = self._session.kv.prefixes, self._session.pool
        needed = prefixes.needed(hashes[: prefixes.reach(hashes)])
        if needed:
            lease = pool.lease(page for key in needed for page in pool.find(key.key) or ())
            self._left.append(Left(lease, until_ns, needed[-1].key))

    def _end_left(self, left: Left) -> None:
        self._left.remove(left)
        self._session.pool.end_lease(left.lease)

    def lost(self, peer: Identity) -> None:
        """A reader is lost."""
        for reader, number in [one for one in self._readings if one[0] == peer]:
            self._session.pool.end_lease(self._readings.pop((reader, number)).lease)

    def tick(self, now_ns: int) -> None:
        """Leases end by themselves."""
        for key in [key for key, reading in self._readings.items() if reading.until_ns <= now_ns]:
            self._session.pool.end_lease(self._readings.pop(key).lease)
        for left in [left for left in self._left if left.until_ns <= now_ns]:
            self._end_left(left)

    def reset(self) -> None:
        """Nobody finds what was left here any more. What others read stays as it is."""
        for left in list(self._left):
            self._end_left(left)

    def leases(self) -> list[Lease]:
        """Those that it has in the pool."""
        return [one.lease for one in self._readings.values()] + [one.lease for one in self._left]
