"""Two sessions over a network that drops, delays, repeats, reorders; and lives that end."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.channels import WhenFull
from meshlm.protocol.frames import unpack
from meshlm.protocol.ids import Identity, Incarnation, Role
from meshlm.protocol.session import (
    REPLAY_AFTER_S,
    Delivered,
    Hello,
    Opened,
    Refused,
    SendQueueFull,
    Session,
    SessionState,
)

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


def test_opens_and_delivers_in_order() -> None:
    net = Network(make(A, B), make(B, A))
    net.settle()
    assert all(session.state is SessionState.OPEN for session in net.ends.values())
    for number in range(100):
        net.ends[A].send(b"%d" % number, net.now)
    net.collect()
    net.settle()
    assert net.got[B] == [b"%d" % number for number in range(100)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_exactly_once_in_order_whatever_the_network_does(data: st.DataObject) -> None:
    net = Network(make(A, B), make(B, A))
    net.settle()
    sent: dict[Identity, list[bytes]] = {A: [], B: []}
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["send", "send", "deliver", "drop", "repeat", "tick"]))
        if action == "send":
            me, other = data.draw(st.sampled_from([(A, B), (B, A)]))
            net.ends[me].send(b"%d" % number, net.now)
            sent[other].append(b"%d" % number)
            net.collect()
        elif action == "tick":
            net.now += data.draw(st.sampled_from([0.01, 0.1, 1.5]))
            for session in net.ends.values():
                session.tick(net.now)
            net.collect()
        elif net.flying:
            index = data.draw(st.integers(0, len(net.flying) - 1))
            if action == "drop":
                net.flying.pop(index)
            else:
                net.deliver(index, keep=action == "repeat")
        net.check()
    net.settle()
    assert net.got == sent


def test_a_new_life_replaces_the_old_and_its_late_frames_are_dropped() -> None:
    net = Network(make(A, B), make(B, A))
    net.settle()
    net.ends[B].send(b"late", net.now)
    net.collect()
    (late,) = net.flying
    net.flying.clear()
    net.ends[B] = make(B, A, life=2)
    net.ends[B].tick(net.now)
    hello = net.ends[B].wire.popleft()
    outcome = net.ends[A].receive(*unpack(hello), net.now)
    assert outcome == Opened(Incarnation(2), Incarnation(1), Hello("d", "ipc://x"))
    assert net.ends[A].receive(*unpack(late[1]), net.now) is None


def test_a_life_that_ended_is_not_heard_again() -> None:
    """Found by tests/simulation: the coordinator's welcome, read after the news of its death, opened a session for ever."""
    net = Network(make(A, B), make(B, A))
    net.ends[A].tick(net.now)
    net.collect()
    net.deliver(0)
    assert [to for to, _ in net.flying] == [A], "B's welcome"
    assert not net.ends[A].close(Incarnation(1)), "B died before A had a session with it"
    net.deliver(0)
    assert net.ends[A].state is SessionState.CLOSED
    net.ends[B] = make(B, A, life=2)
    net.settle()
    assert net.ends[A].peer_incarnation == 2


def test_a_replay_greets_a_life_that_nobody_told_of() -> None:
    """Found by tests/simulation: B was replaced, A did not hear of it, and the new B does not know A."""
    net = Network(make(A, B), make(B, A))
    net.settle()
    net.ends[A].send(b"lost", net.now)
    net.ends[A].wire.clear()
    net.ends[B] = make(B, A, life=2)
    net.now += REPLAY_AFTER_S
    net.ends[A].tick(net.now)
    hello = net.ends[A].wire.popleft()
    assert net.ends[B].receive(*unpack(hello), net.now) == Opened(Incarnation(1), None, Hello("d", "ipc://x"))
    net.ends[A].wire.clear()
    net.collect()
    net.deliver(0)
    assert net.ends[A].peer_incarnation == 2


def test_a_different_schema_is_refused_in_words() -> None:
    a, b = make(A, B, digest="one"), make(B, A, digest="two")
    a.tick(0.0)
    refused = b.receive(*unpack(a.wire.popleft()), 0.0)
    assert isinstance(refused, Refused)
    assert "different versions" in refused.reason
    assert a.receive(*unpack(b.wire.popleft()), 0.0) == refused


def test_a_full_queue_raises() -> None:
    session = make(A, B, window=2)
    session.state, session.peer_incarnation = SessionState.OPEN, Incarnation(1)
    for _ in range(2 + 1000):  # window and queue
        session.send(b"", 0.0)
    with pytest.raises(SendQueueFull) as full:
        session.send(b"", 0.0)
    assert full.value.when_full is WhenFull.REFUSE


def test_hello_is_msgpack() -> None:
    session = make(A, B)
    session.tick(0.0)
    _, body = unpack(session.wire[0])
    assert msgspec.msgpack.decode(body, type=Hello).digest == "d"
