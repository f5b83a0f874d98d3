"""Requests between two ranks: which are on their way, who has their KV, which ranks wait for their workers, and when a rank is asked
for requests.

Pure; owned by core.py. rehome.py says which requests should leave; this asks their rank for them, once, and knows of those that are
at no rank. Where they go is decided when their detokenizer admits them again, which is the core's part.
"""

from collections.abc import Iterable, Mapping

from meshlm.coordinator import rehome
from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.replies import readmits
from meshlm.coordinator.routing import Router
from meshlm.protocol.edges.admit import GiveBack, Returned
from meshlm.protocol.edges.control import Member
from meshlm.protocol.wire.ids import Identity, RequestId
from meshlm.runtime.process.events import Send

MOVE_S = 3.0  # a request that should have moved and did not may be asked for again after this
RESCUE_S = 0.1  # between two looks for room for what has no workers


class Moves:
    """`router` is the core's."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._until: dict[RequestId, float] = {}
        self._handed: dict[
            RequestId, tuple[Rank, float]
        ] = {}  # the rank that computed the prompt, and until when that counts
        self._stranded: set[Identity] = set()  # ranks with requests and without workers
        self._rescue_at = 0.0

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._until or request_id in self._handed

    def __len__(self) -> int:
        return len(self._until)

    def begin(self, request_ids: Iterable[RequestId], now: float) -> None:
        """Asked back, or known to be nowhere: their detokenizer admits them again."""
        self._until.update(dict.fromkeys(request_ids, now + MOVE_S))

    def returned(
        self,
        rank: Rank,
        returned: Iterable[Returned],
        owner: dict[RequestId, Identity],
        members: Mapping[Identity, Member],
        now: float,
    ) -> list[Send]:
        """Requests that a rank gave back: nobody has them now but their detokenizers, which admit them again. owner: the rank of each
        request, which forgets these."""
        found: dict[tuple[Identity, bool], list[Returned]] = {}
        for one in returned:
            entry = rank.requests.get(one.request_id)
            if entry is not None and (entry.attempt, entry.incarnation) == (one.attempt, one.incarnation):
                self._router.drop(rank, one.request_id)
                del owner[one.request_id]
                if not one.handed_off:
                    self.begin((one.request_id,), now)
            if one.handed_off and one.request_id not in owner:  # else a newer attempt of it has a rank already
                self.hand_off(one.request_id, rank, now)
            member = members.get(one.detokenizer)
            if member is not None and member.incarnation == one.incarnation:
                found.setdefault((one.detokenizer, one.handed_off), []).append(one)
        return readmits(found)

    def hand_off(self, request_id: RequestId, rank: Rank, now: float) -> None:
        """This rank gave it back with its first token. It is no sign of a rank without room, so it holds up no other move."""
        self._handed[request_id] = (rank, now + MOVE_S)

    def holder(self, request_id: RequestId) -> Rank | None:
        """The rank that has handed the request off, and has its KV."""
        handed = self._handed.get(request_id)
        return handed[0] if handed is not None else None

    def end(self, request_id: RequestId) -> bool:
        """It has a rank again, stays or has ended. Whether it was on its way."""
        handed = self._handed.pop(request_id, None)
        return self._until.pop(request_id, None) is not None or handed is not None

    def expire(self, now: float) -> None:
        self._until = {request_id: until for request_id, until in self._until.items() if until > now}
        self._handed = {request_id: handed for request_id, handed in self._handed.items() if handed[1] > now}

    def loaded(self, rank: Rank, could: bool, now: float) -> None:
        """The rank's own word came; `could` it serve before? Without its workers, rescue() looks for room elsewhere."""
        if rank.serving:
            self._stranded.discard(rank.identity)
            if not could:
                for request_id in rank.requests:
                    self.end(request_id)  # asked for too late
        elif rank.requests and rank.identity not in self._stranded:
            self._stranded.add(rank.identity)
            self._rescue_at = now

    def lost(self, identity: Identity) -> None:
        """This rank is gone, and with it what could be asked back."""
        self._stranded.discard(identity)

    def rebalance(self, now: float) -> list[Send]:
        """Ask back what waits at a full rank while another is free."""
        if not self._router.num_waiting or self._router.num_open < 2 or self._until:
            return []  # while some are on their way, the ledger does not show where the room will be
        return self._ask(rehome.plan(self._router.ranks.values()), now)

    def look_again(self, now: float) -> None:
        """Other ranks take requests than before: do not wait with the next rescue."""
        self._rescue_at = now

    def rescue(self, now: float) -> list[Send]:
        """Ask a rank back what it cannot run without its workers, as far as other ranks have room."""
        if not self._stranded or now < self._rescue_at:
            return []
        self._rescue_at = now + RESCUE_S
        if not self._router.num_open or self._until:
            return []
        ranks = self._router.ranks
        return self._ask(rehome.rescue([ranks[identity] for identity in self._stranded], ranks.values()), now)

    def _ask(self, leaving: dict[Identity, list[RequestId]], now: float) -> list[Send]:
        for request_ids in leaving.values():
            self.begin(request_ids, now)
        return [Send(identity, GiveBack(tuple(request_ids))) for identity, request_ids in leaving.items()]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for identity in self._stranded:
            assert not self._router.ranks[identity].serving, "stranded although it serves"
