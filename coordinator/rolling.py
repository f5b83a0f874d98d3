"""Turns: ranks change their weights one after another while the others serve. Pure; owned by weights.py.

A rank whose turn it is gets no new requests, and those that have not begun there go elsewhere. With the mode `wait` what runs there
comes to its end; with `abort` it ends at once; with `keep` nobody waits for it, and it goes on at other ranks as after a death. Then
the rank may be asked to change, and when it serves again the next one's turn begins.

A request whose first tokens other weights computed stays with those (but for `keep`): it may go only to ranks that have them, if need
be back to the one whose turn it is, which then waits for it. So a rank is not asked while such requests are on their way: given back
by a rank, lost with one, or with a detokenizer that has not come back yet. Where no rank has those weights any more, it is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from meshlm.coordinator.held import Held
from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.moves import MOVE_S, Moves
from meshlm.coordinator.routing import Choice, Router
from meshlm.protocol.edges.admit import Admit, EngineRequest, GiveBack, Refused, SchedulerIncarnation
from meshlm.protocol.operations import AbortRunning, Operation, OperationId
from meshlm.protocol.weights import RollMode
from meshlm.protocol.wire.ids import ErrorKind, Identity, RequestId
from meshlm.runtime.process.events import Send

DETOKENIZER_S = 30.0  # how long the next incarnation of a detokenizer is waited for, whose requests come again


class Turn(Enum):
    """Of the rank `at`."""

    NOBODY = "nobody's turn"
    DRAINING = "its requests end"
    ASKED = "it was asked to change"


class Turns:
    """`router`, `moving` and `held` are the core's."""

    def __init__(self, router: Router, moving: Moves, held: Mapping[RequestId, Held], num_ranks: int) -> None:
        self._router, self._moving, self._held = router, moving, held
        self.mode: RollMode = "wait"
        self.turn = Turn.NOBODY
        self.at: Identity | None = None
        self.num_ranks = num_ranks
        self._labels: frozenset[str] = frozenset()  # of the versions that serve side by side
        self._left: frozenset[str] = frozenset()  # of those that no rank has since the last roll
        self._not_before = self._ask_back_at = self._wait_s = 0.0
        self._missing: dict[Identity, float] = {}  # detokenizers, and until when they are waited for

    @property
    def ranks(self) -> Mapping[Identity, Rank]:
        return self._router.ranks

    # --- begin and end ---

    def begin(self, mode: RollMode, labels: Iterable[str], wait_s: float = 0.0) -> None:
        """Ranks take turns from now on. labels: of the versions that will serve. wait_s: how long requests may be on their way of which
        this coordinator does not know."""
        self.mode, self._labels = mode, frozenset(labels)
        self._left -= self._labels
        self._wait_s = wait_s

    def end(self, label: str = "") -> None:
        """All have had theirs, and this version alone serves now; or it was called off."""
        self._pass_on()
        if self.mode != "keep" and label:
            self._left = self._labels - {label}
        self._labels = frozenset()

    def forget(self) -> None:
        """Ranks change all at once, and requests go on with other weights: who has which is of no account."""
        self._left = frozenset()

    def detokenizer_lost(self, identity: Identity, now: float) -> None:
        self._missing[identity] = now + DETOKENIZER_S

    def joined(self, identity: Identity, now: float) -> None:
        if self._missing.pop(identity, None) is not None:
            self._not_before = max(self._not_before, now + MOVE_S)

    # --- turns ---

    def go_on(self, needs: Callable[[Rank], bool], now: float) -> tuple[list[Send], Rank | None]:
        """What is said, and the rank that is to be asked to change now. needs: whether a rank has yet to change."""
        ranks = self._router.ranks
        self._not_before, self._wait_s = max(self._not_before, now + self._wait_s if self._wait_s else 0.0), 0.0
        rank = None if self.at is None else ranks.get(self.at)
        is_removed = rank is None and self.at is not None and self.at.index >= self.num_ranks
        if is_removed or (rank is not None and (rank.retiring or not needs(rank))):
            self._pass_on()
        if self.at is None:
            return self._next(needs, now)
        if rank is None:
            return [], None  # its scheduler is coming back
        self._router.close(rank, True)  # a new incarnation, before it gets a request
        if rank.load is None:
            return [], None
        if self.turn is Turn.DRAINING and rank.serving and not self._has_others(rank) and self.num_ranks > 1:
            self._pass_on()  # another rank was lost: nobody would take new requests
            return [], None
        return self._drain(rank, now)

    def _next(self, needs: Callable[[Rank], bool], now: float) -> tuple[list[Send], Rank | None]:
        """The next turn begins: first of ranks that do not serve, since nobody waits for those."""
        there = [rank for rank in self._router.ranks.values() if not rank.retiring]
        if len(there) < self.num_ranks or any(rank.load is None for rank in there):
            return [], None
        for rank in sorted((rank for rank in there if needs(rank)), key=lambda rank: (rank.serving, rank.number)):
            if rank.serving and not self._has_others(rank) and self.num_ranks > 1:
                continue
            self.at, self.turn = rank.identity, Turn.DRAINING
            self._router.close(rank, True)
            sends = [] if self.mode == "keep" else [Send(rank.identity, GiveBack((), everything=True))]
            if self.mode == "abort":
                name = OperationId(f"roll-abort-{rank.incarnation}-{now:.3f}")
                sends.append(Send(rank.identity, Operation(name, AbortRunning())))
            more, asked = self._drain(rank, now)
            return [*sends, *more], asked
        return [], None

    def _has_others(self, rank: Rank) -> bool:
        return any(other.open for other in self._router.ranks.values() if other is not rank)

    def _drain(self, rank: Rank, now: float) -> tuple[list[Send], Rank | None]:
        """Whether the rank is free of what has to end with its weights."""
        if self.turn is not Turn.DRAINING:
            return [], None
        if self.mode != "keep":
            if not rank.idle:
                if not rank.behind or rank.serving or now < self._ask_back_at:
                    return [], None
                self._ask_back_at = now + MOVE_S
                self._moving.begin(rank.requests, now)  # its weights are gone: what began with them cannot go on there
                return [Send(rank.identity, GiveBack((), everything=True))], None
            self._missing = {one: until for one, until in self._missing.items() if until > now}
            label = _label(rank)
            waits = any(one.admit.work.weights in (label, "") for one in self._begun_and_held())
            if self._moving or self._missing or waits or now < self._not_before:
                return [], None
        self.turn = Turn.ASKED
        return [], rank

    def _begun_and_held(self) -> Iterable[Held]:
        return (one for one in self._held.values() if one.admit.work.output_token_ids)

    def once_more(self, not_before: float = 0.0) -> None:
        """The rank whose turn it is is to be asked for the next thing, or for the same again."""
        self._not_before = max(self._not_before, not_before)
        if self.at is not None:
            self.turn = Turn.DRAINING
            self._router.changes += 1  # requests that stay with its weights may go there again

    def _pass_on(self) -> None:
        if self.at is not None and (rank := self._router.ranks.get(self.at)) is not None:
            self._router.close(rank, False)
        self.at, self.turn = None, Turn.NOBODY

    # --- requests ---

    def choose(self, admit: Admit, wanted: int) -> Choice | None:
        """The rank for a request: `wanted`, or any if that is -1; one whose weights are those of its tokens."""
        work, moving = admit.work, self._moving
        name, by = work.request_id, moving.holder(work.request_id)
        lost = (*admit.lost, *self.barred(work))
        choice = self._router.choose(work, wanted, lost, name in moving, by, admit.again)
        if choice is None and (back := self.way_back(work)) != -1 and wanted in (-1, back):
            choice = self._router.choose(work, back, admit.lost, name in moving, by, returns=True)
        return choice

    def barred(self, work: EngineRequest) -> tuple[SchedulerIncarnation, ...]:
        """Ranks whose weights are not those that computed the request's tokens."""
        if not self._binds(work):
            return ()
        others = (rank for rank in self._router.ranks.values() if _label(rank) != work.weights)
        return tuple(SchedulerIncarnation(rank.identity, rank.incarnation) for rank in others)

    def way_back(self, work: EngineRequest) -> int:
        """The number of the rank whose turn it is, where that may take this request although it is closed; -1: it may not."""
        if self.turn is not Turn.DRAINING or self.at is None or not self._binds(work):
            return -1
        rank = self._router.ranks.get(self.at)
        return rank.number if rank is not None and _label(rank) == work.weights else -1

    def refusal(self, admit: Admit) -> Refused | None:
        """The refusal of a request that no rank can go on with."""
        work, ranks = admit.work, self._router.ranks.values()
        if not self._binds(work) or len(ranks) < self.num_ranks or any(rank.load is None for rank in ranks):
            return None
        if any(_label(rank) == work.weights and not rank.behind for rank in ranks):
            return None
        text = f"no rank has the weights {work.weights!r} any more, which computed the first tokens of this answer"
        return Refused(work.handle, ErrorKind.INTERNAL, text)

    def _binds(self, work: EngineRequest) -> bool:
        """Whether the request has tokens of one of the versions that serve, or served in the last roll, and is to stay with it."""
        return self.mode != "keep" and bool(work.output_token_ids) and work.weights in self._labels | self._left

    # --- words ---

    def words(self, needs: Callable[[Rank], bool]) -> str:
        """How far it is, for whoever asks."""
        ranks = self._router.ranks.values()
        num_left = sum(needs(rank) for rank in ranks)
        whose = "" if self.at is None else f"; {self.at}: {self.turn.value}"
        return f"{len(ranks) - num_left} of {len(ranks)} ranks have them{whose}"

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert (self.at is None) == (self.turn is Turn.NOBODY)
        for rank in self._router.ranks.values():
            assert not rank.closed or rank.identity == self.at, "closed, and it is not its turn"


def _label(rank: Rank) -> str | None:
    return None if rank.weights is None else rank.weights.label
