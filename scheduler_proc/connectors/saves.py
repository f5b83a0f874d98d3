"""Saves: blocks that this rank has computed go to the store, and to the workers' connectors, behind its steps.

Pure; owned by transfers.py, for one session with the workers. No step waits for a save: pages that are being copied are leased, and
never more than a share of the pool. What finds no room there waits for the next result, and is left out once its pages are evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from meshlm.protocol.edges.kv import NOT_HERE, OfferPages, PagesStored, PagesWanted
from meshlm.protocol.wire.columns import ints
from meshlm.scheduler_proc.connectors.moves import MOVE_NS, Move, Moves
from meshlm.scheduler_proc.connectors.session import STORE, PageSession
from meshlm.scheduler_proc.connectors.settled import Settled
from meshlm.scheduler_proc.kv.lease import Key, Lease

MOST_LEASED = 8  # one page of the pool in so many is being saved, at most
BATCH = 256  # keys of an offer


@dataclass(slots=True, eq=False)
class Save:
    """Keys that are being copied, their pages, and which of the offer they were; no offer: to a connector."""

    keys: list[Key]
    lease: Lease
    offer: int = 0
    places: Sequence[int] = ()  # of the keys in the offer
    num_offered: int = 0


class Saves:
    """The saves of one session."""

    def __init__(self, session: PageSession, connectors: Sequence[str], moves: Moves, settled: Settled) -> None:
        self._session, self._connectors, self._moves, self._settled = session, connectors, moves, settled
        self._pending: dict[bytes, None] = {}
        self._offers: dict[int, list[Key]] = {}  # that the store has not answered
        self._void: set[int] = set()  # those of them that were made before a reset
        self._saves: dict[int, Save] = {}  # by number of the move
        self._num_pages = 0  # that are offered or leased

    def add(self, keys: Sequence[bytes]) -> None:
        """These are settled now."""
        if self._connectors or self._session.store:
            self._pending.update(dict.fromkeys(keys))
            for key in list(islice(self._pending, max(0, len(self._pending) - self._session.pool.num_blocks))):
                del self._pending[key]

    def offer(self, now_ns: int) -> None:
        """Offers as many of them as there is room for."""
        while batch := self._next_batch():
            self._offer(batch, now_ns)

    def _next_batch(self) -> list[Key]:
        """The next keys that are still cached; none where there is no room yet."""
        batch: list[Key] = []
        for key in list(islice(self._pending, BATCH if self._has_room(1) else 0)):
            pages = self._settled.find(key)
            if not self._has_room(len(pages)):
                break
            del self._pending[key]
            if pages:
                self._num_pages += len(pages)
                batch.append(Key(key, len(pages)))
        return batch

    def _has_room(self, num_pages: int) -> bool:
        return not self._num_pages or (self._num_pages + num_pages) * MOST_LEASED <= self._session.pool.num_blocks

    def _offer(self, batch: list[Key], now_ns: int) -> None:
        session = self._session
        targets = len(self._connectors) + bool(session.store)
        self._num_pages += (targets - 1) * sum(key.width for key in batch)
        for name in self._connectors:
            keys = [key.key for key in batch for _ in range(key.width)]
            self._save(Save(batch, self._lease(batch)), Move(name, False, (), keys=keys), now_ns)
        if session.store:
            number = next(session.numbers)
            self._offers[number] = batch
            columns = b"".join(key.key for key in batch), bytes(key.width for key in batch)
            session.send(STORE, OfferPages(number, session.namespace, *columns))

    def _lease(self, keys: Sequence[Key]) -> Lease:
        return self._session.pool.lease(page for key in keys for page in self._settled.find(key.key))

    def _save(self, save: Save, move: Move, now_ns: int) -> None:
        move.pages, move.deadline_ns = save.lease.pages, now_ns + MOVE_NS
        self._moves.begin(move)
        self._saves[move.number] = save

    def wanted(self, answer: PagesWanted, now_ns: int) -> None:
        """The store says which of an offer it wants, and where."""
        offered = self._offers.pop(answer.number, None)
        if offered is None:
            return
        session, pages, at = self._session, ints(answer.pages), 0
        wanted: list[tuple[int, list[int]]] = []  # place in the offer, pages there
        for place, key in enumerate(offered):
            there = pages[at : at + key.width]
            at += key.width
            if len(there) == key.width and NOT_HERE not in there:
                wanted.append((place, there))
        is_void = answer.number in self._void
        self._void.discard(answer.number)
        here = [one for one in wanted if not is_void and len(self._settled.find(offered[one[0]].key)) == len(one[1])]
        keys = [offered[place] for place, _ in here]
        self._num_pages -= sum(key.width for key in offered) - sum(key.width for key in keys)
        if keys:
            save = Save(keys, self._lease(keys), answer.number, [place for place, _ in here], len(offered))
            there = [page for _, some in here for page in some]
            self._save(save, Move("store", False, (), there, session.store), now_ns)
        elif any(page != NOT_HERE for page in pages):
            session.send(STORE, PagesStored(answer.number, bytes(len(offered))))

    def moved(self, move: Move) -> None:
        """All workers have made this copy, if it is one of ours."""
        save = self._saves.pop(move.number, None)
        if save is None:
            return
        self._num_pages -= len(save.lease.pages)
        self._session.pool.end_lease(save.lease)
        stored, at = bytearray(save.num_offered), 0
        for key, place in zip(save.keys, save.places or range(len(save.keys)), strict=True):
            if move.failed.isdisjoint(range(at, at + key.width)):
                self._session.counts.add("kv_saved_blocks", move.kind)
                if save.offer:
                    stored[place] = 1
            at += key.width
        if save.offer and self._session.store:
            self._session.send(STORE, PagesStored(save.offer, bytes(stored)))

    def store_lost(self) -> None:
        """It answers no offer any more. What is being copied to it ends by itself."""
        for batch in self._offers.values():
            self._num_pages -= sum(key.width for key in batch)
        self._offers.clear()
        self._void.clear()
        for save in self._saves.values():
            save.offer = 0

    def reset(self) -> None:
        """What was computed is not what these keys mean from now on."""
        self._pending.clear()
        self._void.update(self._offers)

    def leases(self) -> list[Lease]:
        """Those that it has in the pool."""
        return [save.lease for save in self._saves.values()]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        offered = sum(key.width for batch in self._offers.values() for key in batch)
        assert self._num_pages == offered + sum(len(lease.pages) for lease in self.leases())
