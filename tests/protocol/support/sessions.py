"""Two sessions over a network that does with their frames what a test says."""

from meshlm.protocol.wire.channels import WhenFull
from meshlm.protocol.wire.frames import unpack
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.protocol.wire.session import Delivered, Hello, Session

A, B = Identity(Role.SCHEDULER, 0), Identity(Role.DETOKENIZER, 3)


def make(me: Identity, peer: Identity, life: int = 1, digest: str = "d", window: int = 8) -> Session:
    return Session(me, Incarnation(life), peer, Hello(digest, "ipc://x"), window, 1000, WhenFull.REFUSE)


class Network:
    """Moves frames between two sessions as the test says."""

    def __init__(self, a: Session, b: Session) -> None:
        self.ends = {A: a, B: b}
        self.got: dict[Identity, list[bytes]] = {A: [], B: []}
        self.flying: list[tuple[Identity, bytes]] = []
        self.now = 0.0

    def collect(self) -> None:
        for me, other in ((A, B), (B, A)):
            wire = self.ends[me].wire
            self.flying += [(other, frame) for frame in wire]
            wire.clear()

    def deliver(self, index: int, *, keep: bool = False) -> None:
        to, frame = self.flying[index] if keep else self.flying.pop(index)
        header, body = unpack(frame)
        self.ends[to].heard()
        outcome = self.ends[to].receive(header, body, self.now)
        if isinstance(outcome, Delivered):
            self.got[to].append(bytes(outcome.body))
        self.check()
        self.collect()

    def check(self) -> None:
        for session in self.ends.values():
            session.check()

    def settle(self) -> None:
        """A fair network from here on: everything arrives, timers run."""
        for _ in range(200):
            self.now += 0.6
            for session in self.ends.values():
                session.tick(self.now)
            self.collect()
            while self.flying:
                self.deliver(0)
