"""The detokenizer, the real coordinator and two schedulers that may die; links without order among each other."""

from array import array
from collections import deque
from typing import Protocol

from hypothesis import strategies as st
from journal_bench import TABLE
from msgspec import Struct

from meshlm.coordinator import core as coordinator_core
from meshlm.coordinator.core import Coordinator
from meshlm.coordinator.roles import SHORT_PROMPT
from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.events import Effect, Encode, Encoded
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import AbortRequests, Assign, Load, Readmit, Returned
from meshlm.protocol.edges.text import Abort, Rejected, Submit, TextDeltas, TokenPrompt
from meshlm.protocol.edges.token import Ended, First, StillThere, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerLost, PeerUp, Received

FRONTEND, DETOKENIZER = Identity(Role.FRONTEND), Identity(Role.DETOKENIZER)
SCHEDULERS = (Identity(Role.SCHEDULER, 0), Identity(Role.SCHEDULER, 1))
MORTALS = (COORDINATOR, *SCHEDULERS)
LIFE = Incarnation(1)
Sends = list[tuple[Identity, Struct]]


def truth(name: str, index: int) -> int:
    name, _, _ = name.partition("-")  # what follows is of one attempt
    return (len(name) * 7 + index * 3) % len(TABLE)


class Process(Protocol):
    """What lives in the mesh. The answers are (to, message)."""

    def up(self, peer: Identity, life: Incarnation) -> Sends: ...
    def lost(self, peer: Identity, life: Incarnation) -> Sends: ...
    def heard(self, peer: Identity, life: Incarnation, message: Struct) -> Sends: ...


class TheCoordinator:
    def __init__(self, num_prefill_ranks: int) -> None:
        self.core = Coordinator(max_waiting=2, num_ranks=len(SCHEDULERS), num_prefill_ranks=num_prefill_ranks)

    def _do(self, event: coordinator_core.Event) -> Sends:
        sends = self.core.handle(event, 0.0)
        self.core.check()
        return [(send.to, send.message) for send in sends]

    def up(self, peer: Identity, life: Incarnation) -> Sends:
        return []

    def lost(self, peer: Identity, life: Incarnation) -> Sends:
        return self._do(PeerLost(peer, life))

    def heard(self, peer: Identity, life: Incarnation, message: Struct) -> Sends:
        return self._do(Received(peer, life, message))


class FakeScheduler:
    """The rules of scheduler_proc/core.py for what it is assigned; one token at a time for whom the test says."""

    def __init__(self, identity: Identity, life: Incarnation) -> None:
        self.identity, self.life = identity, life
        self.detokenizer = Incarnation(0)
        self.early: list[Assign] = []
        self.requests: dict[RequestId, tuple[Assign, int]] = {}  # and the tokens that exist
        self.num_handed_off = 0

    def up(self, peer: Identity, life: Incarnation) -> Sends:
        if peer == DETOKENIZER:
            self.detokenizer = life
            early, self.early = self.early, []
            for assign in early:
                self.assign(assign)
            return []
        member = control.Member(self.identity, self.life, "", True)
        return [(COORDINATOR, control.Join(member)), (COORDINATOR, self.load())]

    def load(self, *ended: RequestId, returned: tuple[Returned, ...] = ()) -> Load:
        return Load(len(self.requests), 0, 100, 100, 0, ended, returned=returned)

    def lost(self, peer: Identity, life: Incarnation) -> Sends:
        if peer != DETOKENIZER:
            return []
        self.detokenizer = Incarnation(0)
        gone, self.requests = list(self.requests), {}
        return [(COORDINATOR, self.load(*gone))] if gone else []

    def heard(self, peer: Identity, life: Incarnation, message: Struct) -> Sends:
        match message:
            case Assign():
                self.assign(message)
            case AbortRequests(request_ids=names):
                gone = [name for name in names if self.requests.pop(name, None) is not None]
                self.early = [assign for assign in self.early if assign.work.request_id not in names]
                return [(COORDINATOR, self.load(*gone))]
            case StillThere(handles=handles):
                here = {assign.work.handle for assign, _ in self.requests.values()}
                missing = tuple(Handle(handle) for handle in ints(handles) if handle not in here)
                return [(DETOKENIZER, Readmit(missing))] if missing else []
        return []

    def assign(self, assign: Assign) -> None:
        if assign.incarnation != self.detokenizer:
            self.early.append(assign)
            return
        known = self.requests.get(assign.work.request_id)
        if known is None or known[0].work.attempt < assign.work.attempt:
            self.requests[assign.work.request_id] = (assign, len(assign.work.output_token_ids) // 4)

    def step(self, name: RequestId) -> Sends:
        assign, index = self.requests[name]
        work = assign.work
        self.requests[name] = (assign, index + 1)
        ends = index + 1 == work.sampling.max_tokens
        deltas = TokenDeltas(
            pack_i32([work.handle]),
            pack_i32([index]),
            b"",
            pack_i32([truth(name, index)]),
            [Ended(0, FinishReason.LENGTH)] if ends else [],
            first={0: First(0)} if index == len(work.output_token_ids) // 4 else {},
        )
        sends: Sends = [(DETOKENIZER, deltas)]
        if ends:
            del self.requests[name]
            sends.append((COORDINATOR, self.load(name)))
        elif assign.hands_off:
            del self.requests[name]
            self.num_handed_off += 1
            one = Returned(name, work.attempt, work.handle, DETOKENIZER, assign.incarnation, handed_off=True)
            sends.append((COORDINATOR, self.load(returned=(one,))))
        return sends


class TheDetokenizer:
    """And the frontend, which never fails."""

    def __init__(self, prompt: list[int]) -> None:
        self.core = Detokenizer(TABLE, len(TABLE), 1000)
        self.prompt = array("i", prompt)
        self.names: list[RequestId] = []
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, FinishReason] = {}
        self.gone: set[RequestId] = set()

    def _do(self, event: Received | PeerUp | PeerLost | Encoded) -> Sends:
        sends: Sends = []
        effects: list[Effect] = self.core.handle(event, 0.0)
        self.core.check()
        for effect in effects:
            if isinstance(effect, Encode):
                sends += self._do(Encoded(effect.job, self.prompt))
            elif effect.to == FRONTEND:
                assert not isinstance(effect.message, Rejected), effect.message
            else:
                sends.append((effect.to, effect.message))
        for send in self.core.journal.batches():
            assert isinstance(send.message, TextDeltas)
            self._read(send.message)
        return sends

    def _read(self, batch: TextDeltas) -> None:
        at, tokens = 0, ints(batch.token_ids)
        ends = {end.row: end.reason for end in batch.finished}
        for row, (handle, start) in enumerate(zip(ints(batch.handles), ints(batch.starts), strict=True)):
            count = ints(batch.counts)[row] if batch.counts else 1
            name = self.names[handle - 1]
            assert name not in self.ends | dict.fromkeys(self.gone), "news after the end"
            assert start == len(self.tokens[name])
            self.tokens[name] += tokens[at : at + count]
            at += count
            if row in ends:
                self.ends[name] = ends[row]

    def up(self, peer: Identity, life: Incarnation) -> Sends:
        join: Sends = [(COORDINATOR, control.Join(control.Member(DETOKENIZER, LIFE, "", True)))]
        return (join if peer == COORDINATOR else []) + self._do(PeerUp(peer, life))

    def lost(self, peer: Identity, life: Incarnation) -> Sends:
        return self._do(PeerLost(peer, life))

    def heard(self, peer: Identity, life: Incarnation, message: Struct) -> Sends:
        return self._do(Received(peer, life, message))

    def submit(self, max_tokens: int) -> Sends:
        name = RequestId("r" * (len(self.names) + 1))
        self.names.append(name)
        self.tokens[name] = []
        prompt = TokenPrompt(pack_i32([1, 2, 3]))
        submit = Submit((Handle(len(self.names)),), (name,), prompt, SamplingParams(), max_tokens=max_tokens, attempt=1)
        return self._do(Received(FRONTEND, LIFE, submit))

    def abort(self, name: RequestId) -> Sends:
        if name not in self.ends:
            self.gone.add(name)
        return self._do(Received(FRONTEND, LIFE, Abort((name,))))


Address = tuple[Identity, Incarnation]


class World:
    """Sessions as runtime/mesh/mesh.py gives them: in order, once, between two lives that have seen each other."""

    def __init__(self, num_prefill_ranks: int = 0) -> None:
        self.num_prefill_ranks = num_prefill_ranks
        self.detokenizer = TheDetokenizer([1] * (SHORT_PROMPT + 9) if num_prefill_ranks else [1, 2, 3])
        self.life: dict[Identity, Incarnation] = {DETOKENIZER: LIFE}
        self.processes: dict[Identity, Process] = {DETOKENIZER: self.detokenizer}
        self.links: dict[tuple[Address, Address], deque[Struct]] = {}
        self.notices: dict[tuple[Identity, Identity], deque[tuple[bool, Incarnation]]] = {}  # (who, about whom): up?
        self.open: dict[tuple[Identity, Identity], Incarnation] = {}
        self.broken: set[tuple[Identity, Identity]] = set()  # links whose end the first has not noticed yet
        self.num_lives = 1
        for identity in MORTALS:
            self.start(identity)

    def linked(self, identity: Identity) -> list[Identity]:
        return [
            other
            for other in self.processes
            if other != identity and not (other in SCHEDULERS and identity in SCHEDULERS)
        ]

    def start(self, identity: Identity) -> None:
        self.num_lives += 1
        life = self.life[identity] = Incarnation(self.num_lives)
        is_coordinator = identity == COORDINATOR
        process = TheCoordinator(self.num_prefill_ranks) if is_coordinator else FakeScheduler(identity, life)
        self.processes[identity] = process
        for other in self.linked(identity):
            self.notices.setdefault((identity, other), deque()).append((True, self.life[other]))
            self.notices.setdefault((other, identity), deque()).append((True, life))

    def kill(self, identity: Identity, data: st.DataObject) -> None:
        """Some of what it said last still arrives."""
        life = self.life.pop(identity)
        del self.processes[identity]
        for (sender, receiver), link in list(self.links.items()):
            if sender == (identity, life):
                for _ in range(data.draw(st.integers(0, len(link)))):
                    link.pop()
            elif receiver == (identity, life):
                del self.links[sender, receiver]
        self.notices = {pair: waiting for pair, waiting in self.notices.items() if pair[0] != identity}
        self.open = {pair: seen for pair, seen in self.open.items() if pair[0] != identity}
        self.broken = {pair for pair in self.broken if pair[0] != identity}
        for other in self.linked(identity):
            about = self.notices.setdefault((other, identity), deque())
            if (True, life) in about:
                about.remove((True, life))  # never known to `other`
            else:
                about.append((False, life))

    def cut(self, one: Identity, other: Identity) -> None:
        """Both live, but cannot reach each other for a while: what is in flight is lost, and the same lives meet again."""
        for who, about in ((one, other), (other, one)):
            self.links.pop(((who, self.life[who]), (about, self.life[about])), None)
            self.broken.add((who, about))
            waiting = self.notices.setdefault((who, about), deque())
            waiting += [(False, self.life[about]), (True, self.life[about])]

    def whole(self) -> list[tuple[Identity, Identity]]:
        """Links that may be cut: both ends have the other."""
        pairs = [(one, other) for one in (DETOKENIZER, COORDINATOR) for other in MORTALS if one != other]
        return [
            (one, other)
            for one, other in pairs
            if self.life.get(one, -1) == self.open.get((other, one))
            and self.life.get(other, -1) == self.open.get((one, other))
            and not self.notices.get((one, other))
            and not self.notices.get((other, one))
        ]

    def send(self, sender: Identity, sends: Sends) -> None:
        for to, message in sends:
            if (sender, to) in self.open and (sender, to) not in self.broken:  # else LinkDown, or lost on its way
                key = ((sender, self.life[sender]), (to, self.open[sender, to]))
                self.links.setdefault(key, deque()).append(message)

    def possible(self) -> list[tuple[str, object, object]]:
        """What may happen next."""
        found: list[tuple[str, object, object]] = [
            ("notice", *key) for key, waiting in self.notices.items() if waiting and not self.too_early(*key)
        ]
        for (sender, receiver), link in self.links.items():
            coming = (True, sender[1]) in self.notices.get((receiver[0], sender[0]), ())
            if link and not coming:
                found.append(("deliver", sender, receiver))
        for identity in SCHEDULERS:
            scheduler = self.processes.get(identity)
            if isinstance(scheduler, FakeScheduler):
                found += [("step", identity, name) for name in scheduler.requests]
        return found

    def too_early(self, who: Identity, about: Identity) -> bool:
        """A session is open again when the other end has answered: that knows by then that the one before has ended."""
        is_up, _ = self.notices[who, about][0]
        return is_up and (False, self.life[who]) in self.notices.get((about, who), ())

    def happen(self, kind: str, one: object, two: object) -> None:
        if kind == "notice":
            assert isinstance(one, Identity)
            assert isinstance(two, Identity)
            self.notice(one, two)
        elif kind == "step":
            assert isinstance(one, Identity)
            scheduler = self.processes[one]
            assert isinstance(scheduler, FakeScheduler)
            self.send(one, scheduler.step(two))  # type: ignore[arg-type]
        else:
            self.deliver(one, two)  # type: ignore[arg-type]
        self.check()

    def notice(self, who: Identity, about: Identity) -> None:
        is_up, life = self.notices[who, about].popleft()
        process = self.processes[who]
        if is_up:
            self.open[who, about] = life
            self.send(who, process.up(about, life))
        else:
            self.broken.discard((who, about))
            del self.open[who, about]
            self.send(who, process.lost(about, life))

    def deliver(self, sender: Address, receiver: Address) -> None:
        message = self.links[sender, receiver].popleft()
        to_this_life = self.life.get(receiver[0]) == receiver[1]  # said before the sender knew that it had died
        if to_this_life and self.open.get((receiver[0], sender[0])) == sender[1]:
            self.send(receiver[0], self.processes[receiver[0]].heard(*sender, message))

    def check(self) -> None:
        """No two schedulers may answer the same stream."""
        handles = [
            assign.work.handle
            for identity in SCHEDULERS
            if isinstance(scheduler := self.processes.get(identity), FakeScheduler)
            for assign, _ in scheduler.requests.values()
        ]
        assert len(handles) == len(set(handles)), "two ranks have the same attempt"
