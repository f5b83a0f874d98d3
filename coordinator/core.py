"""The coordinator's pure core: who is a member, which rank has a request, what waits for a rank.

`handle(event, now)` gets messages with their senders, and answers with messages to send. Called by io.py.
"""

import sys
from collections.abc import Iterable

from meshlm.coordinator import replies
from meshlm.coordinator.frontends import Frontends
from meshlm.coordinator.held import Held, hold
from meshlm.coordinator.joint import JointGroup
from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.moves import Moves
from meshlm.coordinator.operations import Operations
from meshlm.coordinator.patience import Patience
from meshlm.coordinator.resting import Resting
from meshlm.coordinator.rolling import Turns
from meshlm.coordinator.routing import Choice, Policy, Router
from meshlm.coordinator.weights import Weights
from meshlm.protocol.adapters import AdapterList
from meshlm.protocol.config.kv_transfer import counts_of
from meshlm.protocol.counts import Counted
from meshlm.protocol.edges import admit as edge
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import Admit, EngineRequest, Load, Refused
from meshlm.protocol.lockstep import JointReport
from meshlm.protocol.operations import OfCoordinator, Operation, OperationDone, Pause, Resume
from meshlm.protocol.sleeping import AWAKE, Sleeping
from meshlm.protocol.weights import Manifest, WeightsVersion
from meshlm.protocol.wire.ids import COORDINATOR, HEAD, Epoch, ErrorKind, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick

Event = Received | PeerLost | Tick


class Coordinator:
    """The members, the ranks and their requests. `num_ranks` are configured, whether or not they are there yet.

    Clients know the ranks by their number plus `first_rank`: this mesh may be one of several behind a load balancer.
    `places`: requests that run at a time in a rank."""

    def __init__(
        self,
        max_waiting: int,
        num_ranks: int,
        policy: Policy = "cache-aware",
        prefix_caching: bool = True,
        first_rank: int = 0,
        places: int = sys.maxsize,
        lockstep: JointGroup | None = None,
        sleep_mode: bool = False,
        num_prefill_ranks: int = 0,
        weights: Manifest | None = None,
        adapters_kept: int = 1,
        received: str = "",
    ) -> None:
        self.max_waiting, self.num_ranks, self.first_rank = max_waiting, num_ranks, first_rank
        self.members: dict[Identity, control.Member] = {}
        self.epoch = 0
        self.router = Router(policy, prefix_caching, places, adapters_kept)
        self.router.set_roles(num_prefill_ranks)
        self.owner: dict[RequestId, Identity] = {}
        self.held: dict[RequestId, Held] = {}  # no rank that they may have serves, in the order of arrival
        self.moving = Moves(self.router)
        self.sleeping: dict[Identity, Sleeping] = {}  # the ranks' workers, also while their schedulers are not there
        self.sleep_mode = sleep_mode
        self.turns = Turns(self.router, self.moving, self.held, num_ranks)
        manifest = weights or Manifest(WeightsVersion())
        self.weights = Weights(manifest, self._ask_for_weights, self.turns, self._no_turns, received)
        self.frontends = Frontends(self.members, self.router, self.held, self.sleeping, self.weights, first_rank)
        self.patience = Patience(self.weights, self.frontends, self._ask)
        self.operations = Operations()
        self.lockstep = lockstep
        self.resting = None if lockstep is None else Resting(lockstep, self._ask_ranks)
        self._seen_changes = 0
        self._decides_pause = False  # an operator has asked this incarnation: what ranks say of pauses is older

    @property
    def ranks(self) -> dict[Identity, Rank]:
        return self.router.ranks

    def handle(self, event: Event, now: float) -> list[Send]:
        before = self.weights.current
        effects = self.weights.heard(self._handle(event, now), now)
        effects += self.weights.go_on(self.ranks, now)
        if not self.weights.current.is_same(before):
            self.weights.judge_all(self.router)
            effects += self.frontends.serving_change()
        return effects + self._look_again(now)

    def _look_again(self, now: float) -> list[Send]:
        """Where other ranks take requests than before: those that wait are sent, and some are moved."""
        if self.router.changes == self._seen_changes:
            return []
        self._seen_changes = self.router.changes
        self.moving.look_again(now)
        return [*self._release(), *self.moving.rebalance(now)]

    def _handle(self, event: Event, now: float) -> list[Send]:
        match event:
            case Received():
                effects = self._received(event, now)
            case PeerLost():
                effects = self._lost(event, now)
            case Tick():
                effects = [
                    *self._expire(now, event.wall_s),
                    *self.moving.rebalance(now),
                    *self._drained(),
                    *self.operations.expire(self.ranks, self.num_ranks, now),
                    *(replies.late_pauses(self.ranks.values()) if self.frontends.paused else ()),
                    *self.weights.catch_up(self.ranks, now),
                    *self.patience.look(now),
                    *(self.lockstep.tick() if self.lockstep is not None else ()),
                    *self.frontends.tick(),
                ]
        effects += self._look_again(now)
        if self.resting is not None:
            effects += self.resting.go_on(now)
        if self.frontends.gate.due(now) and not self._full():
            effects += self.frontends.queue_open()
        return effects + self.moving.rescue(now)

    def _received(self, event: Received, now: float) -> list[Send]:
        match event.message:
            case Admit() as admit:
                return self._admit(event.sender, event.incarnation, admit, now)
            case edge.AbortRequests() as abort:
                return self._abort(abort.request_ids)
            case Load() as load:
                return self._load(event.sender, event.incarnation, load, now)
            case control.Join() as join:
                return self._join(join.member, now)
            case control.Leave():
                return self._lost(PeerLost(event.sender, event.incarnation), now)
            case control.Blocked() as blocked:
                return self.frontends.blocked(event.sender, blocked.reason)
            case AdapterList() as adapters:
                return self.frontends.has_adapters(event.sender, adapters)
            case control.AskStats():
                return self.frontends.ask(event.sender)
            case Counted(counts=counts):
                self.frontends.counted(event.sender, counts)
            case JointReport() as report if self.lockstep is not None:
                rank = self.ranks.get(event.sender)
                here = rank is not None and rank.incarnation == event.incarnation
                return self.lockstep.reported(event.sender, report) if here else []
            case Operation() as operation:
                self.patience.heard(operation.action, now)
                return self._ask(event.sender, self.weights.joining(operation), now)
            case OperationDone() as done:
                return self.operations.answered(event.sender, done)
            case control.ChangeSettings(values=values):
                self._change(values)
            case control.SetRanks() as ranks:
                return self._set_ranks(ranks.num_ranks, now)
        return []

    def _change(self, values: dict[str, str | int | float]) -> None:
        """Settings are others from now on; the process has looked at the values."""
        if isinstance(most := values.get("max_waiting"), int):
            self.max_waiting = most
        if isinstance(text := values.get("dp_roles"), str):
            self.router.set_roles(counts_of(text)["prefill"])

    def _ask(self, asker: Identity, operation: Operation, now: float) -> list[Send]:
        if isinstance(operation.action, OfCoordinator):
            return self.weights.asked(asker, operation, now)
        if why := self.weights.not_now(operation.action, self.ranks.values()):
            return [Send(asker, OperationDone(operation.id, why))]
        if self.resting is not None and self.resting.takes(operation.action):
            return self.resting.wait(asker, operation, now)
        return self._ask_ranks(asker, operation, now)

    def _ask_for_weights(self, operation: Operation, now: float, rank: Identity | None) -> list[Send]:
        """All ranks, or this one between its last step and its next."""
        if rank is None:
            return self._ask(COORDINATOR, operation, now)
        return self.operations.ask_one(COORDINATOR, operation, rank, now)

    def _no_turns(self) -> str:
        return replies.no_turns(self.num_ranks, self.lockstep is not None, self.frontends.asleep, self.frontends.paused)

    def _ask_ranks(self, asker: Identity, operation: Operation, now: float) -> list[Send]:
        return self._asking(self.operations.ask(asker, operation, self.ranks, self.num_ranks, now))

    def _asking(self, sends: list[Send]) -> list[Send]:
        """Gives the messages, and notes of operations among them whether the mesh is to be paused."""
        for send in sends:
            if isinstance(send.message, Operation) and isinstance(send.message.action, Pause | Resume):
                self.frontends.paused, self._decides_pause = isinstance(send.message.action, Pause), True
        return sends

    # --- membership ---

    def _join(self, member: control.Member, now: float) -> list[Send]:
        known = self.members.get(member.identity)
        if known is not None and (known.incarnation > member.incarnation or known == member):
            return [*self._welcome(member.identity), Send(member.identity, self._list())] if known == member else []
        effects: list[Send] = []
        self.turns.joined(member.identity, now)
        if known is not None and known.incarnation != member.incarnation:
            effects = self._lost(PeerLost(known.identity, known.incarnation), now)
        self.members[member.identity] = member
        if member.identity.role is Role.SCHEDULER and member.identity not in self.ranks:
            self.router.add(Rank(member.identity, member.incarnation, retiring=member.identity.index >= self.num_ranks))
            effects += self._welcome(member.identity)
            effects += self._asking(self.operations.joined(member.identity, self.ranks, self.num_ranks, now))
        return [*effects, *self._announce(), *self.frontends.joined(member.identity)]

    def _welcome(self, identity: Identity) -> list[Send]:
        welcomed = self.sleep_mode and identity.role is Role.SCHEDULER
        return [Send(identity, edge.Welcome(self.sleeping.get(identity, AWAKE)))] if welcomed else []

    def _announce(self) -> list[Send]:
        self.epoch += 1
        whole = self._list()
        return [Send(identity, whole) for identity in self.members]

    def _list(self) -> control.Members:
        return control.Members(Epoch(self.epoch), tuple(self.members.values()))

    def _lost(self, lost: PeerLost, now: float) -> list[Send]:
        member = self.members.get(lost.identity)
        if member is None or member.incarnation != lost.incarnation:
            return self.frontends.blocked(lost.identity, "")
        del self.members[lost.identity]
        told = self.frontends.blocked(lost.identity, "")
        told += self.frontends.lost(lost.identity) + self.operations.lost(lost.identity, now)
        if lost.identity.role is Role.SCHEDULER:
            self.moving.lost(lost.identity)
            told += self.lockstep.lost(lost.identity) if self.lockstep is not None else []
            requests = self.router.remove(lost.identity).requests
            for request_id in requests:
                del self.owner[request_id]
            self.moving.begin(requests, now)
            rank_lost = edge.RankLost(edge.SchedulerIncarnation(lost.identity, lost.incarnation))
            told += [Send(identity, rank_lost) for identity in self.members if identity.role is Role.DETOKENIZER]
        elif lost.identity.role is Role.DETOKENIZER:
            self.turns.detokenizer_lost(lost.identity, now)
            for request_id in [name for name, held in self.held.items() if held.sender == lost.identity]:
                del self.held[request_id]
        return told + self._announce() + self.frontends.serving_change()

    def _set_ranks(self, num_ranks: int, now: float) -> list[Send]:
        """Ranks are added or removed. One that is removed gives back what it has not started and ends the rest."""
        self.num_ranks = self.turns.num_ranks = num_ranks
        last = Identity(Role.SCHEDULER, num_ranks - 1)
        effects = self._asking(self.operations.joined(last, self.ranks, num_ranks, now))
        for gone in [identity for identity in self.sleeping if identity.index >= num_ranks]:
            del self.sleeping[gone]
        for rank in self.ranks.values():
            retiring = rank.number >= num_ranks
            if retiring and not rank.retiring:
                effects.append(Send(rank.identity, edge.GiveBack((), everything=True)))
            self.router.retire(rank, retiring)
        return effects + self._drained() + self._release()

    def _drained(self) -> list[Send]:
        return [Send(HEAD, control.RankDrained(one.number)) for one in self.ranks.values() if one.retiring and one.idle]

    # --- requests ---

    def _admit(self, sender: Identity, incarnation: Incarnation, admit: Admit, now: float) -> list[Send]:
        self.held.pop(admit.work.request_id, None)
        refused = self._refusal(admit)
        if refused is not None:
            overloaded = refused.kind is ErrorKind.OVERLOADED
            return [Send(sender, refused), *(self.frontends.queue_full(now) if overloaded else ())]
        choice = self._choose(admit)
        if choice is None:
            self.held[admit.work.request_id] = hold(sender, incarnation, admit, now)
            return []
        return self._dispatch(choice, sender, incarnation, admit)

    def _wanted(self, admit: Admit) -> int:
        """The number of the rank that it must go to; -1: any. One that was let in lives on when its rank is removed."""
        wanted = admit.dp_rank if admit.again or admit.dp_rank == -1 else admit.dp_rank - self.first_rank
        return wanted if wanted < self.num_ranks else -1

    def _choose(self, admit: Admit) -> Choice | None:
        return self.turns.choose(admit, self._wanted(admit))

    def _refusal(self, admit: Admit) -> Refused | None:
        work = admit.work
        if refused := replies.no_such_rank(admit, self.first_rank, self.num_ranks) or self.turns.refusal(admit):
            return refused
        if work.attempt or work.output_token_ids or admit.again:
            return None  # it was let in before, and its client may read already
        if self._full():
            text = f"{self.max_waiting} requests are waiting already (--max-waiting)"
            return Refused(work.handle, ErrorKind.OVERLOADED, text)
        return None

    def _full(self) -> bool:
        return self.router.full(self.max_waiting - len(self.held))

    def _dispatch(self, choice: Choice, sender: Identity, incarnation: Incarnation, admit: Admit) -> list[Send]:
        work, rank = admit.work, choice.rank
        holder = choice.holder.identity if choice.holder is not None else None
        effects = self._leave_others(work, rank)
        self.owner[work.request_id] = rank.identity
        self.router.dispatch(choice, work, incarnation, pinned=admit.dp_rank != -1 and not admit.again)
        return [
            *effects,
            Send(rank.identity, edge.Assign(work, sender, incarnation, holder, choice.hands_off)),
            Send(sender, edge.Routed(work.handle, rank.identity, rank.incarnation)),
        ]

    def too_long(self, assign: edge.Assign, text: str) -> Refused:
        """The refusal of a request that no frame holds, so that no rank has it; its detokenizer gets it."""
        request_id = assign.work.request_id
        if (rank := self.owner.pop(request_id, None)) is not None:
            self.router.drop(self.ranks[rank], request_id)
        return Refused(assign.work.handle, ErrorKind.INTERNAL, text)

    def _leave_others(self, work: EngineRequest, rank: Rank) -> list[Send]:
        """An earlier attempt ends where it is: no request has two ranks. `rank` itself sees which attempt is newer."""
        nowhere = self.moving.end(work.request_id)
        before = self.owner.get(work.request_id)
        if before is not None:
            self.router.drop(self.ranks[before], work.request_id)
            others: Iterable[Identity] = (before,)
        else:
            # an earlier incarnation of ours may have routed it
            others = self.ranks if work.attempt and not nowhere else ()
        abort = edge.AbortRequests((work.request_id,))
        return [Send(other, abort) for other in others if other != rank.identity]

    def _abort(self, request_ids: Iterable[RequestId]) -> list[Send]:
        by_rank: dict[Identity, list[RequestId]] = {}
        for request_id in request_ids:
            self.held.pop(request_id, None)
            self.moving.end(request_id)
            owner = self.owner.get(request_id)
            # Unknown after a restart of this process: every rank is asked, the one that has it acts.
            for identity in (owner,) if owner is not None else tuple(self.ranks):
                by_rank.setdefault(identity, []).append(request_id)
        return [Send(identity, edge.AbortRequests(tuple(ids))) for identity, ids in by_rank.items()]

    def _load(self, sender: Identity, incarnation: Incarnation, load: Load, now: float) -> list[Send]:
        rank = self.ranks.get(sender)
        if rank is None or rank.incarnation != incarnation:
            return []
        first, could = rank.load is None, rank.serving
        effects = self.moving.returned(rank, load.returned, self.owner, self.members, now)
        for started in load.started if self.moving else ():
            self.moving.end(started.request_id)  # asked for too late
        for request_id in load.ended:
            self.moving.end(request_id)
            if self.owner.get(request_id) == sender:
                del self.owner[request_id]
        if first and load.paused and not self._decides_pause:  # an earlier coordinator was asked for it
            self.frontends.paused = True
        if load.serving or load.sleeping.tags:  # else its workers have not said it yet
            self.sleeping[sender] = load.sleeping
        if first and self.frontends.paused and not load.paused:
            effects.append(replies.pause(rank))  # before the first request that it gets
        self.router.load(rank, self.weights.judged(load))
        effects += self.weights.catch_up({sender: rank}, now)
        rank.graphs = rank.graphs if load.graphs is None else load.graphs
        rank.counts = rank.counts if load.counts is None else load.counts
        if rank.serving or not self.weights.changes:  # else it is about to
            self.moving.loaded(rank, could, now)
        if rank.retiring:
            lost = could and not rank.serving  # what ran there can be given back now
            effects += [Send(sender, edge.GiveBack((), everything=True))] if first or lost else self._drained()
        effects += self.frontends.serving_change() if rank.serving is not self.frontends.serving else []
        return effects + self.frontends.answered(sender, load.answers)

    def _release(self) -> list[Send]:
        """Other ranks serve than before: requests that may go there are sent, in the order of arrival."""
        effects: list[Send] = []
        for request_id, held in list(self.held.items()):
            if (choice := self._choose(held.admit)) is not None:
                del self.held[request_id]
                effects += self._dispatch(choice, held.sender, held.incarnation, held.admit)
        return effects

    def _expire(self, now: float, wall_s: float) -> list[Send]:
        self.moving.expire(now)
        since = 0.0 if self.frontends.asleep else now
        over = ((one, held.refusal(since, wall_s) or self.turns.refusal(held.admit)) for one, held in self.held.items())
        refused = {one: why for one, why in over if why is not None}
        return [Send(self.held.pop(one).sender, why) for one, why in refused.items()]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.router.check()
        self.moving.check()
        self.turns.check()
        for rank in self.ranks.values():
            assert rank.identity in self.members, "a rank that is no member"
            for request_id in rank.requests:
                assert self.owner.get(request_id) == rank.identity, "a request with two ranks"
        for request_id, identity in self.owner.items():
            assert request_id in self.ranks[identity].requests, "an owned request that its rank does not have"
        for held in self.held.values():
            assert self._choose(held.admit) is None, "held although a rank serves"
