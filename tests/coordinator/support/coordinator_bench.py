"""A coordinator on the bench, and what is said to it: shared by its tests."""

from typing import Any

from msgspec import Struct

from meshlm.coordinator.core import Coordinator
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import Admit, Assign, EngineRequest, Load
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick

F0, F1 = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1)
D0, D1 = Identity(Role.DETOKENIZER), Identity(Role.DETOKENIZER, 1)
S0, S1, S2 = (Identity(Role.SCHEDULER, index) for index in range(3))
LIFE = Incarnation(1)
WALL_S = 1.75e9


def admit(name: str, prompt_len: int = 10, max_tokens: int = 10, handle: int = 1, **more: object) -> Admit:
    dp_rank = more.pop("dp_rank", -1)
    assert isinstance(dp_rank, int)
    prompt, sampling = pack_i32(range(prompt_len)), SamplingParams(max_tokens=max_tokens)
    return Admit(EngineRequest(RequestId(name), Handle(handle), prompt, sampling, **more), dp_rank)  # type: ignore[arg-type]


def load(num_running: int = 0, num_waiting: int = 0, free: int = 100, **more: Any) -> Load:
    return Load(num_running, num_waiting, 100, free, 0, **more)


def member(identity: Identity, life: int = LIFE, ready: bool = True) -> control.Member:
    return control.Member(identity, Incarnation(life), f"ipc:///{identity}-{life}", ready)


class Bench:
    """A coordinator, a clock, and a check after every event."""

    def __init__(
        self,
        *identities: Identity,
        max_waiting: int = 100,
        num_ranks: int = 3,
        first_rank: int = 0,
        num_prefill_ranks: int = 0,
    ) -> None:
        self.core = Coordinator(max_waiting, num_ranks, first_rank=first_rank, num_prefill_ranks=num_prefill_ranks)
        self.now = 0.0
        for identity in identities:
            self.join(identity)
            if identity.role is Role.SCHEDULER:
                self.says(identity, load())

    def event(self, event: Received | PeerLost | Tick) -> list[Send]:
        sends = self.core.handle(event, self.now)
        self.core.check()
        return sends

    def says(self, sender: Identity, message: Struct, life: int = LIFE) -> list[Send]:
        return self.event(Received(sender, Incarnation(life), message))

    def join(self, identity: Identity, life: int = LIFE, ready: bool = True) -> list[Send]:
        return self.says(identity, control.Join(member(identity, life, ready)), life)

    def lost(self, identity: Identity, life: int = LIFE) -> list[Send]:
        return self.event(PeerLost(identity, Incarnation(life)))

    def tick(self, later_s: float = 1.0) -> list[Send]:
        self.now += later_s
        return self.event(Tick(WALL_S + self.now))


def only(sends: list[Send], kind: type[Struct]) -> list[Send]:
    return [send for send in sends if isinstance(send.message, kind)]


def told(sends: list[Send]) -> dict[Identity, control.Members]:
    return {send.to: send.message for send in sends if isinstance(send.message, control.Members)}


def stats(sends: list[Send]) -> list[control.MeshStats]:
    return [send.message for send in sends if isinstance(send.message, control.MeshStats)]


def assigned(bench: Bench, request: Admit, sender: Identity = D0) -> Identity | None:
    found = only(bench.says(sender, request), Assign)
    return found[0].to if found else None
