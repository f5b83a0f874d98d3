"""Any history of joins, deaths, loads and requests leaves every request with one owner and one end."""

from dataclasses import dataclass, field
from typing import Any

from coordinator_bench import D0, F0, LIFE, S0, S1, S2, Bench, admit, load
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.coordinator.roles import RankRole
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
    Started,
)
from meshlm.protocol.wire.ids import HEAD, Handle, Identity, RequestId
from meshlm.runtime.process.deaths import BEGUN_S, NEW_S
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick

ROLES = ["prefill:1,decode:2", "prefill:2,decode:1"]


@dataclass
class Fake:
    """One scheduler: what it was assigned and has not ended."""

    life: int
    requests: dict[str, int] = field(default_factory=dict)  # request -> attempt
    ended: list[RequestId] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    hands_off: set[str] = field(default_factory=set)
    serving: bool = True


class Mesh(Bench):
    """Fake schedulers and one detokenizer that admits again what a dead scheduler had."""

    def __init__(self, num_prefill_ranks: int = 0) -> None:
        super().__init__(F0, D0, max_waiting=6, num_prefill_ranks=num_prefill_ranks)
        self.schedulers: dict[Identity, Fake] = {}
        self.open: dict[str, Admit] = {}
        self.routed: dict[str, tuple[Identity, int]] = {}
        self.finished: set[str] = set()
        self.refused: set[str] = set()
        self.num_handles = 0
        self.asked: list[tuple[Identity, int, GiveBack]] = []
        self.readmitted: list[Handle] = []

    def event(self, event: Received | PeerLost | Tick) -> list[Send]:
        sends = super().event(event)
        for send in sends:
            assert send.to in self.core.members or send.to == HEAD, "a message to nobody"
            match send.message:
                case Assign() as assign:
                    fake, work = self.schedulers[send.to], assign.work
                    assert not any(work.request_id in other.requests for other in self.schedulers.values())
                    fake.requests[work.request_id] = work.attempt
                    (fake.hands_off.add if assign.hands_off else fake.hands_off.discard)(work.request_id)
                    assert assign.holder is None or (assign.holder in self.schedulers and assign.holder != send.to)
                    assert not assign.hands_off or self.core.ranks[send.to].role is RankRole.PREFILL
                case Routed() as routed:
                    (name,) = [name for name, one in self.open.items() if one.work.handle == routed.handle]
                    assert self.schedulers[routed.scheduler].requests[name] == self.open[name].work.attempt
                    assert self.schedulers[routed.scheduler].life == routed.incarnation
                    self.routed[name] = (routed.scheduler, routed.incarnation)
                case Refused() as refused:
                    (name,) = [name for name, one in self.open.items() if one.work.handle == refused.handle]
                    assert name not in self.routed
                    del self.open[name]
                    self.refused.add(name)
                case AbortRequests() as abort:
                    for name in abort.request_ids:
                        if self.schedulers[send.to].requests.pop(name, None) is not None:
                            self.schedulers[send.to].ended.append(name)
                case GiveBack() as ask:
                    self.asked.append((send.to, self.schedulers[send.to].life, ask))
                case Readmit() as readmit:
                    self.readmitted += readmit.handles
        return sends

    def give_back(self) -> None:
        """What the schedulers were asked to give back comes back, less what has started meanwhile."""
        asked, self.asked = self.asked, []
        for identity, life, ask in asked:
            fake = self.schedulers.get(identity)
            if fake is None or fake.life != life:
                continue
            returned = []
            for name in list(fake.requests) if ask.everything else ask.request_ids:
                if name in fake.requests and (name not in fake.started or not fake.serving):
                    fake.started.discard(name)
                    attempt, handle = fake.requests.pop(name), self.open[name].work.handle
                    returned.append(Returned(RequestId(name), attempt, handle, D0, LIFE))
            self.report(identity, fake.serving, returned=tuple(returned))
        self.readmit()

    def readmit(self) -> None:
        handles, self.readmitted = self.readmitted, []
        for name, one in list(self.open.items()):
            if one.work.handle in handles:
                self.routed.pop(name, None)
                self.submit(name, one.work.attempt + 1, one.dp_rank)

    def begin(self, identity: Identity) -> None:
        """Some of its requests get their first token."""
        fake = self.schedulers[identity]
        new = [name for name in fake.requests if name not in fake.started][:2]
        fake.started.update(new)
        self.report(identity, started=tuple(Started(RequestId(name), 0) for name in new))

    def hand_off(self, identity: Identity) -> None:
        """What has its first token and is to be decoded elsewhere is given back."""
        self.begin(identity)
        fake = self.schedulers[identity]
        leaving = [name for name in fake.requests if name in fake.started & fake.hands_off][:2]
        returned = []
        for name in leaving:
            fake.started.discard(name)
            attempt, handle = fake.requests.pop(name), self.open[name].work.handle
            returned.append(Returned(RequestId(name), attempt, handle, D0, LIFE, handed_off=True))
        self.report(identity, returned=tuple(returned))
        self.readmit()

    def submit(self, name: str, attempt: int, dp_rank: int) -> None:
        self.num_handles += 1
        length = 600 if int(name[1:]) % 3 else 10
        request = admit(name, length, handle=self.num_handles, attempt=attempt, dp_rank=dp_rank)
        self.open[name] = request
        self.says(D0, request)

    def start(self, identity: Identity) -> None:
        if identity not in self.schedulers:
            self.now += 1
            self.schedulers[identity] = fake = Fake(int(self.now * 10))
            self.join(identity, fake.life)
            self.report(identity)

    def report(self, identity: Identity, serving: bool = True, **more: Any) -> None:
        fake = self.schedulers[identity]
        fake.serving = serving
        ended, fake.ended = tuple(fake.ended), []
        num_running = len(fake.started & set(fake.requests))
        num_waiting = len(fake.requests) - num_running
        self.says(identity, load(num_running, num_waiting, ended=ended, serving=serving, **more), fake.life)

    def kill(self, identity: Identity) -> None:
        fake = self.schedulers.pop(identity, None)
        if fake is None:
            return
        self.lost(identity, fake.life)
        for name, (scheduler, life) in list(self.routed.items()):
            if (scheduler, life) == (identity, fake.life):
                del self.routed[name]
                self.submit(name, self.open[name].work.attempt + 1, self.open[name].dp_rank)

    def finish(self, identity: Identity) -> None:
        fake = self.schedulers[identity]
        if fake.requests:
            name, _ = fake.requests.popitem()
            fake.ended.append(RequestId(name))
            del self.open[name], self.routed[name]
            self.finished.add(name)
        self.report(identity)

    def abort(self, name: str) -> None:
        self.open.pop(name, None)
        self.routed.pop(name, None)
        self.says(D0, AbortRequests((RequestId(name),)))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_history_leaves_every_request_with_one_owner_and_one_end(data: st.DataObject) -> None:
    draw = data.draw
    mesh = Mesh(draw(st.sampled_from([0, 1, 2])))
    names: list[str] = []
    gone: set[str] = set()
    for _ in range(draw(st.integers(1, 40))):
        action = draw(
            st.sampled_from(
                ["admit", "admit", "admit", "start", "kill", "finish", "report", "abort", "tick", "rejoin"]
                + ["begin", "hand off", "hand off", "give back", "scale", "roles"]
            )
        )
        identity = draw(st.sampled_from([S0, S1, S2]))
        if action == "admit":
            names.append(f"r{len(names)}")
            mesh.submit(names[-1], 0, draw(st.sampled_from([-1, -1, -1, 0, 1])))
        elif action == "start":
            mesh.start(identity)
        elif action == "kill":
            mesh.kill(identity)
        elif action == "abort" and names:
            gone.add(draw(st.sampled_from(names)))
            for name in sorted(gone):
                mesh.abort(name)
        elif action == "tick":
            mesh.tick(draw(st.sampled_from([1.0, NEW_S / 2])))
        elif action == "rejoin":
            mesh.join(D0)
        elif action == "give back":
            mesh.give_back()
        elif action == "scale":
            mesh.says(HEAD, control.SetRanks(draw(st.integers(1, 3))))
        elif action == "roles" and mesh.core.router.num_prefill_ranks:
            mesh.says(HEAD, control.ChangeSettings({"dp_roles": draw(st.sampled_from(ROLES))}))
        elif identity in mesh.schedulers:
            if action == "finish":
                mesh.finish(identity)
            elif action == "report":
                mesh.report(identity, draw(st.booleans()))
            elif action == "begin":
                mesh.begin(identity)
            elif action == "hand off":
                mesh.hand_off(identity)
    mesh.says(HEAD, control.SetRanks(3))
    for identity in (S0, S1, S2):
        mesh.start(identity)
        mesh.report(identity)
    mesh.give_back()
    for identity in (S0, S1, S2):
        mesh.hand_off(identity)
    mesh.tick(BEGUN_S)  # the end of what waits for a rank of its own
    assert not mesh.core.held
    for identity, fake in mesh.schedulers.items():
        assert set(mesh.core.ranks[identity].requests) == set(fake.requests)
        while fake.requests:
            mesh.finish(identity)
        mesh.report(identity)
        assert mesh.core.ranks[identity].score == 0
    assert not mesh.core.owner
    assert not mesh.open
    assert mesh.finished | mesh.refused | gone >= set(names)
    assert not mesh.finished & mesh.refused
