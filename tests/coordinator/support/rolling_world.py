"""A coordinator, three ranks that have weights and compute tokens, and a detokenizer: every process of it may die while ranks roll."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from coordinator_bench import D0, F0, S0, S1, S2, Bench, admit, load, member
from msgspec.structs import replace

from meshlm.coordinator.core import Coordinator
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import (
    AbortRequests,
    Admit,
    Assign,
    GiveBack,
    Readmit,
    Refused,
    Returned,
    Routed,
    SchedulerIncarnation,
    Started,
)
from meshlm.protocol.operations import (
    AbortRunning,
    CheckWeights,
    Operation,
    OperationDone,
    OperationId,
    UpdateWeights,
    UseWeights,
)
from meshlm.protocol.weights import Manifest, RollMode, WeightsVersion
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Identity, Incarnation, RequestId
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick

RANKS = (S0, S1, S2)
START = WeightsVersion()


@dataclass
class Rank:
    """One scheduler and its worker."""

    life: int
    version: WeightsVersion = START  # that its worker has, or is to have
    is_up: bool = True  # the worker
    behind: str = ""
    requests: dict[str, int] = field(default_factory=dict)  # name -> attempt
    started: set[str] = field(default_factory=set)
    ended: list[RequestId] = field(default_factory=list)
    asked: list[Operation] = field(default_factory=list)


@dataclass
class Request:
    """As its detokenizer has it."""

    admit: Admit
    labels: list[str] = field(default_factory=list)  # of its tokens
    at: SchedulerIncarnation | None = None
    heard: bool = False  # this attempt has a token


class World(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.manifest = Manifest(START)
        self.ranks = {identity: Rank(1) for identity in RANKS}
        self.open: dict[str, Request] = {}
        self.over: dict[str, list[str]] = {}  # what ended: the labels of its tokens
        self.refused: dict[str, str] = {}
        self.given_back: list[tuple[Identity, int, GiveBack]] = []
        self.readmitted: list[int] = []
        self.errors: list[str] = []
        self.num_names = self.num_handles = self.num_updates = 0
        self.detokenizer = 1
        self.lost_schedulers: dict[Identity, int] = {}
        for identity in (F0, D0, *RANKS):
            self.join(identity)
        for identity in RANKS:
            self.report(identity)

    # --- what the coordinator says ---

    def event(self, event: Received | PeerLost | Tick) -> list[Send]:
        sends = super().event(event)
        self.manifest = self.core.weights.manifest  # io.py writes it before it sends
        for send in sends:
            self._hear(send)
        return sends

    def _hear(self, send: Send) -> None:
        rank = self.ranks.get(send.to)
        match send.message:
            case Assign(work=work) if rank is not None and send.to not in self.lost_schedulers:
                if work.request_id in self.open and rank.requests.get(work.request_id, -1) < work.attempt:
                    rank.started.discard(work.request_id)
                    rank.requests[work.request_id] = work.attempt
            case Routed() as routed:
                for one in self.open.values():
                    if one.admit.work.handle == routed.handle:
                        one.at = SchedulerIncarnation(routed.scheduler, routed.incarnation)
            case Refused() as refused:
                for name, one in list(self.open.items()):
                    if one.admit.work.handle == refused.handle:
                        self.refused[name] = refused.message
                        del self.open[name]
            case AbortRequests(request_ids=names) if rank is not None:
                for name in names:
                    self._leaves(rank, name)
            case GiveBack() as wanted if rank is not None:
                self.given_back.append((send.to, rank.life, wanted))
            case Readmit(handles=handles):
                self.readmitted += handles
            case Operation() as operation if rank is not None:
                rank.asked.append(operation)
            case OperationDone(error=error):
                self.errors.append(error)

    def _leaves(self, rank: Rank, name: str) -> None:
        if rank.requests.pop(name, None) is not None:
            rank.started.discard(name)
            rank.ended.append(RequestId(name))

    # --- requests ---

    def new(self) -> None:
        self.num_names += 1
        name = f"r{self.num_names}"
        self.open[name] = Request(admit(name, 10, 1000))
        self.submit(name)

    def submit(self, name: str, *, again: bool = False) -> None:
        one = self.open[name]
        work, self.num_handles = one.admit.work, self.num_handles + 1
        wanted = one.at.scheduler.index if again and one.at is not None else -1
        if not again:
            output = pack_i32(range(len(one.labels)))
            label = one.labels[-1] if one.labels else ""
            handle = type(work.handle)(self.num_handles)
            work = replace(work, handle=handle, attempt=work.attempt + 1, output_token_ids=output, weights=label)
            one.at, one.heard = None, False
        lost = tuple(SchedulerIncarnation(s, Incarnation(life)) for s, life in self.lost_schedulers.items())
        one.admit = Admit(work, wanted, lost, again=again)
        if self.detokenizer:
            self.says(D0, one.admit, self.detokenizer)

    def readmit(self) -> None:
        handles, self.readmitted = self.readmitted, []
        for name, one in list(self.open.items()):
            if one.admit.work.handle in handles and self.detokenizer:
                self.submit(name)

    def step(self, identity: Identity) -> None:
        """Each of its requests gets a token."""
        rank = self.ranks[identity]
        if not rank.is_up or rank.behind or identity in self.lost_schedulers:
            return
        new = []
        for name, attempt in rank.requests.items():
            one = self.open.get(name)
            if name not in rank.started:
                rank.started.add(name)
                new.append(Started(RequestId(name), 0))
            if one is not None and self.detokenizer and one.admit.work.attempt == attempt:
                one.labels.append(rank.version.label)
                one.at, one.heard = SchedulerIncarnation(identity, Incarnation(rank.life)), True
        self.report(identity, started=tuple(new))

    def finish(self, identity: Identity) -> None:
        rank = self.ranks[identity]
        if not rank.is_up or not rank.started or identity in self.lost_schedulers:
            return
        name = sorted(rank.started)[0]
        if name in self.open and self.open[name].admit.work.attempt == rank.requests[name] and self.detokenizer:
            self.over[name] = self.open.pop(name).labels
        self._leaves(rank, name)
        self.report(identity)

    def give_back(self) -> None:
        asked, self.given_back = self.given_back, []
        for identity, life, wanted in asked:
            rank = self.ranks[identity]
            if rank.life != life or identity in self.lost_schedulers:
                continue
            returned = []
            for name in list(rank.requests) if wanted.everything else [str(one) for one in wanted.request_ids]:
                serves = rank.is_up and not rank.behind
                if name in rank.requests and (name not in rank.started or not serves) and name in self.open:
                    handle = self.open[name].admit.work.handle
                    attempt = rank.requests.pop(name)
                    rank.started.discard(name)
                    returned.append(Returned(RequestId(name), attempt, handle, D0, Incarnation(self.detokenizer or 1)))
            self.report(identity, returned=tuple(returned))
        self.readmit()

    # --- ranks ---

    def report(self, identity: Identity, **more: Any) -> None:
        rank = self.ranks[identity]
        if identity in self.lost_schedulers:
            return
        num_running = len(rank.started & set(rank.requests))
        ended, rank.ended = tuple(rank.ended), []
        more = {"ended": ended, "weights": rank.version, "behind": rank.behind, **more}
        serving = rank.is_up and not rank.behind
        self.says(identity, load(num_running, len(rank.requests) - num_running, serving=serving, **more), rank.life)

    def answer(self, identity: Identity, *, fails: bool = False) -> None:
        """The oldest operation that it was asked for is done, or cannot be."""
        rank = self.ranks[identity]
        if not rank.asked or identity in self.lost_schedulers or not rank.is_up:
            return
        operation = rank.asked.pop(0)
        done = OperationDone(operation.id)
        match operation.action:
            case CheckWeights():
                results = (msgspec.json.encode("digest"),)
                done = replace(done, error="no such folder") if fails else replace(done, results=results)
            case UseWeights(version=version):
                rank.is_up, rank.version, rank.behind = False, version, ""
                self.report(identity)
                rank.is_up = True
                if fails:
                    rank.behind = "its files are gone"
                    done = replace(done, error=rank.behind)
            case AbortRunning():
                for name in list(rank.requests):
                    if name in self.open and self.detokenizer:
                        self.over[name] = self.open.pop(name).labels
                    self._leaves(rank, name)
        self.says(identity, done, rank.life)
        self.report(identity)

    # --- deaths ---

    def kill_scheduler(self, identity: Identity, *, with_worker: bool = False) -> None:
        if identity in self.lost_schedulers:
            return
        rank = self.ranks[identity]
        self.lost_schedulers[identity] = rank.life
        version = rank.version
        if with_worker or rank.behind:
            version = self.manifest.version
        self.ranks[identity] = Rank(rank.life + 1, version)
        self.lost(identity, rank.life)
        if self.detokenizer:
            for name, one in list(self.open.items()):
                if one.at == SchedulerIncarnation(identity, Incarnation(rank.life)):
                    self.submit(name)

    def start_scheduler(self, identity: Identity) -> None:
        if self.lost_schedulers.pop(identity, None) is not None:
            self.join(identity, self.ranks[identity].life)
            self.report(identity)

    def kill_worker(self, identity: Identity) -> None:
        self.ranks[identity].is_up = False
        self.report(identity)

    def start_worker(self, identity: Identity) -> None:
        """It reads what its scheduler says."""
        rank = self.ranks[identity]
        rank.is_up, rank.started = True, set()
        self.report(identity)

    def kill_detokenizer(self) -> None:
        if not self.detokenizer:
            return
        life, self.detokenizer = self.detokenizer, 0
        self.lost(D0, life)
        self._life = life
        for identity, rank in self.ranks.items():
            for name in list(rank.requests):
                self._leaves(rank, name)
            self.report(identity)

    def start_detokenizer(self) -> None:
        if self.detokenizer:
            return
        self.detokenizer = self._life + 1
        self.join(D0, self.detokenizer)
        for name, one in list(self.open.items()):
            one.admit = replace(one.admit, work=replace(one.admit.work, attempt=0))
            self.submit(name)

    def kill_coordinator(self) -> None:
        for rank in self.ranks.values():  # what had come before, they do
            asked, rank.asked = rank.asked, []
            for action in (one.action for one in asked):
                if isinstance(action, UseWeights):
                    rank.is_up, rank.version, rank.behind, rank.started = False, action.version, "", set()
        self.core = Coordinator(100, 3, weights=self.manifest)
        self.given_back.clear()
        for identity in (F0, *([D0] if self.detokenizer else [])):
            self.says(identity, control.Join(member(identity, self.detokenizer if identity == D0 else 1)))
        for identity, rank in self.ranks.items():
            if identity not in self.lost_schedulers:
                self.join(identity, rank.life)
                self.report(identity)
        if not self.detokenizer:
            return
        for name, one in list(self.open.items()):
            if not one.heard and name in self.open:
                is_there = one.at is not None and one.at.scheduler not in self.lost_schedulers
                self.submit(name, again=is_there)
            elif one.at is not None and name not in self.ranks[one.at.scheduler].requests:
                self.submit(name)  # the rank says that it is not there (StillThere)

    # --- updates ---

    def update(self, mode: RollMode | None) -> None:
        self.num_updates += 1
        name = f"v{self.num_updates}"
        self.says(F0, Operation(OperationId(f"u{self.num_updates}"), UpdateWeights(f"/{name}", name, rolling=mode)))
