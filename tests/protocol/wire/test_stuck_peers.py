"""A peer that does not take a frame, or reads nothing at all, is noticed, and nothing else is taken for one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import A, B, Network, make

from meshlm.protocol.wire.channels import WhenFull
from meshlm.protocol.wire.frames import HEADER_BYTES
from meshlm.protocol.wire.ids import Incarnation
from meshlm.protocol.wire.session import REPLAY_AFTER_S, Hello, SendQueueFull, Session, SessionState


class Deaf(Network):
    """Everything arrives but frames of more than `limit` bytes: there the receiver's socket ends the connection, and what is behind is
    lost."""

    def __init__(self, a: Session, b: Session, limit: int) -> None:
        super().__init__(a, b)
        self.limit = limit

    def round(self) -> None:
        """A second: timers, and what then flies."""
        self.now += REPLAY_AFTER_S + 0.1
        for session in self.ends.values():
            session.tick(self.now)
        self.collect()
        while self.flying:
            to, frame = self.flying[0]
            if len(frame) > self.limit:
                self.flying = [(other, late) for other, late in self.flying if other != to]
            else:
                self.deliver(0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 8), st.integers(HEADER_BYTES + 90, 300))
def test_a_frame_that_is_never_taken_is_noticed_and_nothing_else(sizes: list[int], window: int, limit: int) -> None:
    net = Deaf(make(A, B, window=window), make(B, A), 1 << 20)
    net.round()
    net.limit = limit
    for size in sizes:
        net.ends[A].send(b"x" * size, net.now)
        net.collect()
    fits = [size for size in sizes if size + HEADER_BYTES <= limit]
    first = next((place for place, size in enumerate(sizes) if size + HEADER_BYTES > limit), len(sizes))
    for _ in range(60):
        assert net.ends[A].blocked or not net.ends[A].stuck
        net.round()
    assert [len(body) for body in net.got[B]] == sizes[:first]
    assert net.ends[A].stuck == (first < len(sizes)) == bool(net.ends[A].held_up) == net.ends[B].starved
    if net.ends[A].stuck:
        assert len(net.ends[A].held_up) == sizes[first]
        assert net.ends[A].lose()
        for _ in range(5):
            net.round()
        assert net.ends[A].state is net.ends[B].state is SessionState.OPEN
        assert not net.ends[A].stuck
        assert not net.ends[A].blocked
        assert not net.ends[B].starved
        for size in fits:
            net.ends[A].send(b"y" * size, net.now)
            net.round()
        assert [len(body) for body in net.got[B]] == sizes[:first] + fits


def test_hellos_of_a_peer_that_greets_anew_are_no_stalls() -> None:
    """A process that was busy finds many of them at once."""
    net = Network(make(A, B), make(B, A))
    net.settle()
    assert net.ends[A].lose()
    for _ in range(10):
        net.now += 1.0
        net.ends[A].tick(net.now)
    net.settle()
    for _ in range(10):
        net.now += 0.2
        net.ends[B].tick(net.now)
        assert not net.ends[B].starved


def test_a_peer_that_is_only_slow_is_not_stuck() -> None:
    """It answers nothing at all: it may be busy, and whether it lives is for others to say."""
    net = Network(make(A, B), make(B, A))
    net.settle()
    net.ends[A].send(b"x", net.now)
    for _ in range(30):
        net.now += REPLAY_AFTER_S + 0.1
        net.ends[A].tick(net.now)
        net.ends[A].wire.clear()
    assert not net.ends[A].blocked


def test_bytes_fill_a_queue_too() -> None:
    """Large messages that the peer does not acknowledge: refused at the limit, and taken again when it has read."""
    a = Session(A, Incarnation(1), B, Hello("d", "ipc://x"), 8, 1000, WhenFull.REFUSE, max_bytes=100)
    network = Network(a, make(B, A))
    network.settle()
    a.send(b"x" * 60, network.now)
    a.send(b"x" * 60, network.now)  # what is over the limit is one message at most
    with pytest.raises(SendQueueFull):
        a.send(b"", network.now)
    assert a.num_bytes == 120
    network.settle()
    assert a.num_bytes == 0
    for _ in range(12):  # more than the window
        a.send(b"x" * 9, network.now)
    with pytest.raises(SendQueueFull):
        a.send(b"", network.now)
    network.settle()
    assert a.num_bytes == 0
    assert len(network.got[B]) == 14
