"""The coordinator's pure core: who is a member, which rank has a request, what waits for a rank.

`handle(event, now)` gets messages with their senders, and answers with messages to send. Called by io.py.
"""

from collections.abc import Iterable

from msgspec import Struct

from meshlm.coordinator.routing import Rank, choose
from meshlm.protocol import control_edge as control
from meshlm.protocol.admit_edge import (
    AbortRequests,
    Admit,
    Assign,
    Load,
    RankLost,
    Refused,
    Routed,
    SchedulerLife,
    Work,
)
from meshlm.protocol.ids import Epoch, ErrorKind, Identity, Incarnation, RequestId, Role

HOLD_S = 60.0  # a request waits so long for a rank that is starting
RESUME_HOLD_S = 600.0  # and one that ran already, since its client reads: a large model loads for minutes


class Received(Struct, frozen=True):
    """A message of a member."""

    sender: Identity
    incarnation: Incarnation
    message: Struct


class PeerLost(Struct, frozen=True):
    """This life of a member is over."""

    identity: Identity
    incarnation: Incarnation


class Tick(Struct, frozen=True):
    """Once a second; `wall_s` is the wall clock, for deadlines."""

    wall_s: float


Event = Received | PeerLost | Tick


class Send(Struct, frozen=True):
    """Send `message` to `to`."""

    to: Identity
    message: Struct


class _Held(Struct, frozen=True):
    sender: Identity
    incarnation: Incarnation
    admit: Admit
    until: float


def _patience_s(admit: Admit) -> float:
    return RESUME_HOLD_S if admit.work.attempt or admit.work.emitted else HOLD_S


class Coordinator:
    """State and rules; see the module docstring. `num_ranks` are configured, whether or not they are there yet."""

    def __init__(self, max_waiting: int, num_ranks: int) -> None:
        self.max_waiting, self.num_ranks = max_waiting, num_ranks
        self.members: dict[Identity, control.Member] = {}
        self.epoch = 0
        self.ranks: dict[Identity, Rank] = {}
        self.owner: dict[RequestId, Identity] = {}
        self.held: dict[RequestId, _Held] = {}  # no rank that they may have serves, in the order of arrival
        self._serving_lives: frozenset[SchedulerLife] = frozenset()
        self._serving = False

    def handle(self, event: Event, now: float) -> list[Send]:
        match event:
            case Received():
                effects = self._received(event, now)
            case PeerLost():
                effects = self._lost(event)
            case Tick():
                effects = [*self._expire(now, event.wall_s), *self._stats()]
        return effects + self._release() + self._serving_change()

    def _received(self, event: Received, now: float) -> list[Send]:
        match event.message:
            case Admit() as admit:
                return self._admit(event.sender, event.incarnation, admit, now)
            case AbortRequests() as abort:
                return self._abort(abort.request_ids)
            case Load() as load:
                return self._load(event.sender, event.incarnation, load)
            case control.Join() as join:
                return self._join(join.member)
            case control.Leave():
                return self._lost(PeerLost(event.sender, event.incarnation))
        return []

    # --- membership ---

    def _join(self, member: control.Member) -> list[Send]:
        known = self.members.get(member.identity)
        if known is not None and (known.incarnation > member.incarnation or known == member):
            return [Send(member.identity, self._list())] if known == member else []
        effects: list[Send] = []
        if known is not None and known.incarnation != member.incarnation:
            effects = self._lost(PeerLost(known.identity, known.incarnation))
        self.members[member.identity] = member
        if member.identity.role is Role.SCHEDULER and member.identity not in self.ranks:
            self.ranks[member.identity] = Rank(member.identity, member.incarnation)
        return effects + self._announce()

    def _announce(self) -> list[Send]:
        self.epoch += 1
        return [Send(identity, self._list()) for identity in self.members]

    def _list(self) -> control.Members:
        return control.Members(Epoch(self.epoch), tuple(self.members.values()))

    def _lost(self, lost: PeerLost) -> list[Send]:
        member = self.members.get(lost.identity)
        if member is None or member.incarnation != lost.incarnation:
            return []
        del self.members[lost.identity]
        if lost.identity.role is Role.SCHEDULER:
            for request_id in self.ranks.pop(lost.identity).requests:
                self.owner.pop(request_id, None)  # its detokenizer admits it again
            told = RankLost(SchedulerLife(lost.identity, lost.incarnation))
            news = [Send(identity, told) for identity in self.members if identity.role is Role.DETOKENIZER]
            return news + self._announce()
        elif lost.identity.role is Role.DETOKENIZER:
            self.held = {name: held for name, held in self.held.items() if held.sender != lost.identity}
        return self._announce()

    # --- requests ---

    def _admit(self, sender: Identity, incarnation: Incarnation, admit: Admit, now: float) -> list[Send]:
        self.held.pop(admit.work.request_id, None)
        refused = self._refusal(admit)
        if refused is not None:
            return [Send(sender, refused)]
        rank = choose(self.ranks.values(), admit.dp_rank, admit.lost)
        if rank is None:
            self.held[admit.work.request_id] = _Held(sender, incarnation, admit, now + _patience_s(admit))
            return []
        return self._dispatch(rank, sender, incarnation, admit)

    def _refusal(self, admit: Admit) -> Refused | None:
        work = admit.work
        if admit.dp_rank >= self.num_ranks:
            name = "X-data-parallel-rank"
            ranks = f"ranks 0 to {self.num_ranks - 1}" if self.num_ranks > 1 else "rank 0 only"
            text = f"{name}: there is no rank {admit.dp_rank}; this mesh has {ranks}"
            return Refused(work.handle, ErrorKind.INVALID, text, name)
        if work.attempt or work.emitted or admit.again:
            return None  # it was let in before, and its client may read already
        if len(self.held) + self._num_waiting() >= self.max_waiting:
            text = f"{self.max_waiting} requests are waiting already (--max-waiting)"
            return Refused(work.handle, ErrorKind.OVERLOADED, text)
        return None

    def _dispatch(self, rank: Rank, sender: Identity, incarnation: Incarnation, admit: Admit) -> list[Send]:
        work = admit.work
        effects = self._leave_others(work, rank)
        self.owner[work.request_id] = rank.identity
        rank.add(work.request_id, len(work.prompt_token_ids) // 4, work.sampling.max_tokens)
        return [
            *effects,
            Send(rank.identity, Assign(work, sender, incarnation)),
            Send(sender, Routed(work.handle, rank.identity, rank.incarnation)),
        ]

    def _leave_others(self, work: Work, rank: Rank) -> list[Send]:
        """An earlier attempt ends where it is: no request has two ranks. `rank` itself sees which attempt is newer."""
        before = self.owner.get(work.request_id)
        if before is not None:
            self.ranks[before].remove(work.request_id)
            others: Iterable[Identity] = (before,)
        else:
            # Routed by an earlier life of this process, maybe: every rank is told.
            others = self.ranks if work.attempt else ()
        abort = AbortRequests((work.request_id,))
        return [Send(other, abort) for other in others if other != rank.identity]

    def _num_waiting(self) -> int:
        return sum(rank.load.num_waiting for rank in self.ranks.values() if rank.load is not None)

    def _abort(self, request_ids: Iterable[RequestId]) -> list[Send]:
        by_rank: dict[Identity, list[RequestId]] = {}
        for request_id in request_ids:
            self.held.pop(request_id, None)
            owner = self.owner.get(request_id)
            # Unknown after a restart of this process: every rank is asked, the one that has it acts.
            for identity in (owner,) if owner is not None else tuple(self.ranks):
                by_rank.setdefault(identity, []).append(request_id)
        return [Send(identity, AbortRequests(tuple(ids))) for identity, ids in by_rank.items()]

    def _load(self, sender: Identity, incarnation: Incarnation, load: Load) -> list[Send]:
        rank = self.ranks.get(sender)
        if rank is None or rank.incarnation != incarnation:
            return []
        rank.load = load
        for request_id in load.ended:
            rank.remove(request_id)
            if self.owner.get(request_id) == sender:
                del self.owner[request_id]
        return []

    def _release(self) -> list[Send]:
        """When other ranks serve than before: send on what may go there, in the order of arrival."""
        serving = frozenset(rank.life for rank in self.ranks.values() if rank.serving)
        if serving == self._serving_lives:
            return []
        self._serving_lives = serving
        effects: list[Send] = []
        for request_id, held in list(self.held.items()):
            rank = choose(self.ranks.values(), held.admit.dp_rank, held.admit.lost)
            if rank is not None:
                del self.held[request_id]
                effects += self._dispatch(rank, held.sender, held.incarnation, held.admit)
        return effects

    def _expire(self, now: float, wall_s: float) -> list[Send]:
        effects: list[Send] = []
        for request_id, held in list(self.held.items()):
            handle = held.admit.work.handle
            if 0 < held.admit.work.deadline_s <= wall_s:
                refused = Refused(handle, ErrorKind.TIMEOUT, "the request's timeout passed")
            elif held.until <= now:
                missing = "no scheduler" if held.admit.dp_rank == -1 else f"no scheduler of rank {held.admit.dp_rank}"
                refused = Refused(
                    handle, ErrorKind.OVERLOADED, f"{missing} was ready within {_patience_s(held.admit):.0f} s"
                )
            else:
                continue
            del self.held[request_id]
            effects.append(Send(held.sender, refused))
        return effects

    # --- what frontends are told ---

    def _serving_change(self) -> list[Send]:
        serving = self._reason() == ""
        if serving == self._serving:
            return []
        self._serving = serving
        return self._stats()

    def _reason(self) -> str:
        """What is missing before requests can be served; "" when nothing is."""
        if not any(rank.serving for rank in self.ranks.values()):
            return "no scheduler with ready workers"
        if not any(m.ready for m in self.members.values() if m.identity.role is Role.DETOKENIZER):
            return "no detokenizer"
        return ""

    def _stats(self) -> list[Send]:
        ranks = tuple(
            control.RankStats(
                dp_rank=rank.identity.index,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                kv_cache_usage=rank.kv_pressure,
                prefix_cache_queries=load.prefix_cache_queries,
                prefix_cache_hits=load.prefix_cache_hits,
                num_preemptions=load.num_preemptions,
                prompt_tokens=load.prompt_tokens,
                generation_tokens=load.generation_tokens,
            )
            for rank in self.ranks.values()
            if (load := rank.load) is not None
        )
        reason = self._reason()
        stats = control.MeshStats(reason == "", reason, ranks, len(self.held))
        return [Send(identity, stats) for identity in self.members if identity.role is Role.FRONTEND]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for rank in self.ranks.values():
            assert rank.identity in self.members, "a rank that is no member"
            assert rank.prefill_tokens == sum(prompt for prompt, _ in rank.requests.values())
            assert rank.decode_tokens == sum(output for _, output in rank.requests.values())
            for request_id in rank.requests:
                assert self.owner.get(request_id) == rank.identity, "a request with two ranks"
        for request_id, identity in self.owner.items():
            assert request_id in self.ranks[identity].requests, "an owned request that its rank does not have"
        for held in self.held.values():
            may_go = choose(self.ranks.values(), held.admit.dp_rank, held.admit.lost)
            assert may_go is None, "held although a rank serves"
