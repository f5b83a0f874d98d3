"""Two sessions over a network that drops, delays, repeats, reorders; and lives that end."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import A, B, Network, make

from meshlm.protocol.wire.channels import WhenFull
from meshlm.protocol.wire.frames import Kind, unpack
from meshlm.protocol.wire.ids import Identity, Incarnation
from meshlm.protocol.wire.session import (
    HELLO_EVERY_S,
    MAX_HELLO_EVERY_S,
    REPLAY_AFTER_S,
    Ended,
    Hello,
    Opened,
    Refused,
    Rival,
    SendQueueFull,
    Session,
    SessionState,
)


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


def test_a_lost_peer_is_greeted_anew() -> None:
    """A lost B, B noticed nothing: what was in flight is gone, then both go on under A's new number."""
    net = Network(make_remote(A, B, "a"), make_remote(B, A, "b"))
    net.settle()
    net.ends[A].send(b"lost", net.now)
    net.ends[B].send(b"lost too", net.now)
    net.collect()
    late, net.flying = net.flying, []
    assert net.ends[A].lose()
    assert not net.ends[A].lose()
    net.ends[A].tick(net.now)
    hello = net.ends[A].wire.popleft()
    outcome = net.ends[B].receive(*unpack(hello), net.now)
    assert isinstance(outcome, Opened)
    assert outcome.replaced == outcome.incarnation == 1, "the same process, a new session"
    net.collect()
    net.flying += late
    net.settle()
    for me in (A, B):
        assert net.ends[me].state is SessionState.OPEN
        net.ends[me].send(b"new", net.now)
    net.settle()
    assert net.got == {A: [b"new"], B: [b"new"]}


def test_an_ack_of_an_earlier_session_acknowledges_nothing() -> None:
    """A lost B; B, who noticed nothing, says hello again with what it has received from A's earlier life."""
    net = Network(make(A, B), make(B, A))
    net.settle()
    net.ends[A].send(b"old", net.now)
    net.settle()
    net.ends[A].lose()
    net.ends[B].send(b"unheard", net.now)
    net.collect()
    net.flying.clear()
    net.now += REPLAY_AFTER_S
    net.ends[B].tick(net.now)
    hello = net.ends[B].wire.popleft()
    net.ends[A].receive(*unpack(hello), net.now)
    net.ends[A].send(b"new", net.now)
    net.ends[A].wire.clear()  # the welcome and the message are lost on their way
    net.ends[A].receive(*unpack(hello), net.now)
    net.settle()
    assert net.got[B] == [b"old", b"new"]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_link_that_is_lost_at_any_time_heals(data: st.DataObject) -> None:
    """What is lost is lost, but never doubled or out of order, and in the end both sides hear each other."""
    net = Network(make(A, B), make(B, A))
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["send", "send", "deliver", "deliver", "drop", "repeat", "tick", "lose"]))
        me = data.draw(st.sampled_from([A, B]))
        if action == "send" and net.ends[me].state is SessionState.OPEN:
            net.ends[me].send(b"%d" % number, net.now)
        elif action == "lose":
            net.ends[me].lose()
        elif action == "tick":
            net.now += data.draw(st.sampled_from([0.01, 0.1, 1.5]))
            net.ends[me].tick(net.now)
        elif action in ("deliver", "drop", "repeat") and net.flying:
            index = data.draw(st.integers(0, len(net.flying) - 1))
            if action == "drop":
                net.flying.pop(index)
            else:
                net.deliver(index, keep=action == "repeat")
        net.collect()
        net.check()
    net.settle()
    assert all(session.state is SessionState.OPEN for session in net.ends.values())
    for me in (A, B):
        # One may have opened with a number that the other gave up since: its first word shows that, and is lost with the session,
        # of which its App is told.
        net.ends[me].send(b"999", net.now)
        net.settle()
    for me, other in ((A, B), (B, A)):
        net.ends[me].send(b"1000", net.now)
        net.settle()
        numbers = [int(body) for body in net.got[other]]
        assert numbers == sorted(set(numbers)), "doubled or out of order"
        assert numbers[-1] == 1000


def make_remote(me: Identity, peer: Identity, node: str, life: int = 1, silence_s: float = 3.0) -> Session:
    hello = Hello("d", "ipc://x", f"tcp://{node}:1", node, Incarnation(life))
    return Session(me, Incarnation(life), peer, hello, 8, 1000, WhenFull.REFUSE, silence_s)


def test_silence() -> None:
    """A peer that says nothing is silent after so long; it is not when it was we who slept."""
    net = Network(make_remote(A, B, "a"), make_remote(B, A, "b"))
    net.settle()
    session = net.ends[A]
    session.heard()
    for _ in range(29):
        net.now += 0.1
        session.tick(net.now)
        assert not session.silent
    keepalives = [unpack(frame)[0].kind for frame in session.wire]
    assert keepalives
    assert set(keepalives) == {Kind.ACK}
    session.heard()
    net.now += 100.0
    session.tick(net.now)
    assert not session.silent
    for _ in range(30):
        net.now += 0.1
        session.tick(net.now)
    assert session.silent
    session.lose()
    assert not session.silent


def test_sessions_of_one_node_are_never_silent() -> None:
    net = Network(make(A, B), make(B, A))
    net.settle()
    for _ in range(1000):
        net.now += 0.1
        net.ends[A].tick(net.now)
    assert not net.ends[A].silent
    assert not net.ends[A].wire


def test_a_rival_of_another_node_is_refused_and_the_session_goes_on() -> None:
    net = Network(make_remote(A, B, "a"), make_remote(B, A, "b"))
    net.settle()
    rival = make_remote(B, A, "c", life=7)
    rival.tick(net.now)
    outcome = net.ends[A].receive(*unpack(rival.wire.popleft()), net.now)
    assert isinstance(outcome, Rival)
    assert outcome.hello.tcp == "tcp://c:1"
    refused = rival.receive(*unpack(outcome.frame), net.now)
    assert isinstance(refused, Refused)
    assert "in this mesh already" in refused.reason
    assert net.ends[B].receive(*unpack(outcome.frame), net.now) is None, "it is not meant for the real one"
    assert net.ends[A].peer_incarnation == 1
    net.ends[B].send(b"still here", net.now)
    net.settle()
    assert net.got[A] == [b"still here"]


def test_a_rival_of_a_silent_peer_takes_its_place() -> None:
    net = Network(make_remote(A, B, "a"), make_remote(B, A, "b"))
    net.settle()
    for _ in range(40):
        net.now += 0.1
        net.ends[A].tick(net.now)
    net.ends[A].lose()
    net.ends[B] = make_remote(B, A, "c", life=7)
    net.settle()
    assert net.ends[A].peer_incarnation == 7


def test_goodbye() -> None:
    net = Network(make(A, B), make(B, A))
    net.settle()
    net.ends[B].bye()
    bye = net.ends[B].wire.popleft()
    assert net.ends[A].receive(*unpack(bye), net.now) == Ended(Incarnation(1))
    assert net.ends[A].state is SessionState.CLOSED
    assert net.ends[A].receive(*unpack(bye), net.now) is None
    net.ends[B].tick(net.now + 10)
    for frame in net.ends[B].wire:
        assert net.ends[A].receive(*unpack(frame), net.now) is None, "it has ended"


def test_a_death_is_of_all_earlier_lives() -> None:
    """Found by tests/simulation: two lives ended before anybody could be told, and only the last is told of."""
    net = Network(make(A, B), make(B, A))
    net.settle()
    assert net.ends[A].close(Incarnation(5))
    assert net.ends[A].state is SessionState.CLOSED


def test_a_peer_that_never_answers_is_greeted_ever_less_often() -> None:
    session, at = make(A, B), []
    for tick in range(6000):
        session.tick(tick / 100)
        at += [tick / 100] * len(session.wire)
        session.wire.clear()
    gaps = [after - before for before, after in pairwise(at)]
    assert gaps[0] < 1.5 * HELLO_EVERY_S
    assert gaps[-1] == pytest.approx(MAX_HELLO_EVERY_S, abs=0.011)
    assert not session.impatient


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
