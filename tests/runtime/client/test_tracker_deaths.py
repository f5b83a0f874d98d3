"""The tracker against detokenizers that die: choices go on elsewhere or wait, and any history gives each client its tokens once."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracker_bench import D0, D1, D2, Client, a_desk, deltas, opened, truth, word

from meshlm.protocol.edges import text as text_edge
from meshlm.protocol.edges.text import (
    Abort,
    Accepted,
    Attach,
    Delivered,
    Finished,
    PositionLogprobs,
    Rejected,
    Retry,
    Submit,
    TextDeltas,
    TokenLogprob,
)
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, RequestId
from meshlm.runtime.client import placement
from meshlm.runtime.client.request_tracker import RequestTracker
from meshlm.runtime.process.deaths import BEGUN_S, MAX_DEATHS, NEW_S, WINDOW_S
from meshlm.runtime.process.events import Send

# --- detokenizers come and go ---


def test_a_dead_detokenizers_choices_go_on_elsewhere() -> None:
    tracker = a_desk(D0, D1)
    client, _ = opened(tracker, n=2)
    first, second = client.choices
    old = second.handle
    tracker.deltas(deltas((second, 0, [1, 2])), D0, 1.0)
    sends = tracker.detokenizer_down(D0, 0.0)
    tracker.check()
    assert [send.to for send in sends] == [D1, D1]
    submits = [send.message for send in sends]
    for choice, submit, delivered in zip((first, second), submits, ([], [1, 2]), strict=True):
        assert isinstance(submit, Submit)
        assert submit.handles == (choice.handle,)
        assert submit.request_ids == (f"r-{choice.index}",)
        assert submit.attempt == 1
        assert submit.sampling.seed == 7 + choice.index
        assert ints(submit.delivered) == delivered
    assert second.handle != old
    tracker.deltas(deltas((old, 2, [99])), D0, 2.0)  # the dead one's last words
    tracker.deltas(deltas((second, 2, [3])), D1, 3.0)
    assert client.tokens == {1: [1, 2, 3]}


def test_without_a_detokenizer_requests_wait() -> None:
    tracker = RequestTracker()
    client, sends = opened(tracker, n=2)
    assert sends == []
    assert list(tracker.orphans) == client.choices
    sends = tracker.detokenizer_up(D2)
    assert [(send.to, type(send.message)) for send in sends] == [(D2, Submit), (D2, Submit)]
    assert not tracker.orphans
    assert tracker.load == {D2: 2}
    tracker.check()
    assert tracker.detokenizer_up(D2) == [], "said twice is heard once"
    assert tracker.load == {D2: 2}


def test_orphans_expire_in_words() -> None:
    tracker = RequestTracker()
    client, _ = opened(tracker)
    tracker.expire_orphans(100.0)
    tracker.expire_orphans(100.0 + NEW_S)
    assert tracker.orphans
    for _ in range(2):
        tracker.expire_orphans(101.0 + NEW_S)
    assert client.errors == {0: (ErrorKind.OVERLOADED, "no detokenizer was there for 60 s", "")}
    assert tracker.detokenizer_up(D0) == []


def test_a_begun_stream_waits_for_a_detokenizer_as_long_as_for_a_rank() -> None:
    tracker = a_desk(D0)
    client, _ = opened(tracker, "a")
    tracker.deltas(deltas((client.choices[0], 0, [truth("a-0", 0)])), D0, 1.0)
    tracker.detokenizer_down(D0, 100.0)
    for at in (100.0, 99.0 + BEGUN_S):
        tracker.expire_orphans(at)
    assert not client.errors
    (send,) = tracker.detokenizer_up(D0)
    assert isinstance(send.message, Submit)
    tracker.detokenizer_down(D0, 1000.0)
    for at in (1000.0, 1001.0 + BEGUN_S):
        tracker.expire_orphans(at)
    assert client.errors == {0: (ErrorKind.OVERLOADED, "no detokenizer was there for 600 s", "")}


def test_an_orphans_time_is_its_own() -> None:
    """However often a detokenizer comes and goes: somebody may wait at each look, and nobody for long."""
    tracker = RequestTracker()
    tracker.detokenizer_up(D0)
    client, _ = opened(tracker, "a")
    for second in range(30):
        tracker.detokenizer_down(D0, 100.0 + second)
        tracker.expire_orphans(100.0 + second)
        tracker.detokenizer_up(D0)
        tracker.deltas(deltas((client.choices[0], second, [second])), D0, 100.0 + second)
    assert (client.tokens, client.errors) == ({0: list(range(30))}, {})
    waiting, _ = opened(tracker, "b")
    tracker.detokenizer_down(D0, 140.0)
    tracker.expire_orphans(140.0)
    late, _ = opened(tracker, "c")
    tracker.expire_orphans(145.0)
    tracker.expire_orphans(141.0 + NEW_S)
    assert [bool(one.errors) for one in (waiting, late)] == [True, False]
    tracker.check()


def test_a_client_that_leaves_takes_its_orphans_along() -> None:
    tracker = RequestTracker()
    client, _ = opened(tracker, "a")
    other, _ = opened(tracker, "b")
    assert tracker.close(client.choices) == []
    assert list(tracker.orphans) == other.choices
    assert len(tracker.detokenizer_up(D0)) == 1


def test_a_deadline_holds_whoever_is_stuck() -> None:
    tracker = a_desk(D0)
    client, orphan, other = (opened(tracker, name, 1, at)[0] for name, at in (("a", 100.0), ("b", 100.0), ("c", 0.0)))
    assert tracker.expire(100.5) == [], "its scheduler's to say"
    tracker.detokenizer_down(D0, 0.0)
    tracker.detokenizer_up(D1)
    (abort,) = tracker.expire(102.0)
    assert abort == Send(D1, Abort((RequestId("a-0"), RequestId("b-0"))))
    assert [late.errors[0][0] for late in (client, orphan)] == [ErrorKind.TIMEOUT] * 2
    assert not other.errors
    tracker.check()
    tracker.detokenizer_down(D1, 0.0)
    waiting, _ = opened(tracker, "d", 1, 100.0)
    assert tracker.expire(102.0) == []
    assert waiting.errors[0][0] is ErrorKind.TIMEOUT
    assert waiting.choices[0] not in tracker.orphans


@pytest.mark.parametrize("most", [MAX_DEATHS, 2])
def test_a_request_that_kills_detokenizers_is_given_up(most: int) -> None:
    tracker = a_desk(D0)
    tracker.max_deaths = most
    client, _ = opened(tracker)
    num_sent = 1
    for _ in range(MAX_DEATHS + 2):
        num_sent += len(tracker.detokenizer_down(D0, 0.0)) + len(tracker.detokenizer_up(D0))
        tracker.check()
    assert num_sent == most
    kind, text, _ = client.errors[0]
    assert kind is ErrorKind.INTERNAL
    assert f"its detokenizer died {most} times within 60 s" in text


def test_what_detokenizers_died_with_in_hand_is_refused_alone() -> None:
    """The second time; with all of its client's request. Who was only there has met no death."""
    tracker = a_desk(D0)
    poison, _ = opened(tracker, "p", n=2)
    other, _ = opened(tracker, "o")
    for number in range(3 * MAX_DEATHS):
        in_hand = (poison.choices[0].submit.request_ids[0],) if number < 2 else ("another's",)
        tracker.detokenizer_down(D0, float(number), in_hand)
        sends = tracker.detokenizer_up(D0)
        tracker.check()
        suspects = {
            send.message.request_ids[0]: send.message.suspect for send in sends if isinstance(send.message, Submit)
        }
        assert suspects == ({"p-0": True, "p-1": True} if number == 0 else {}) | {"o-0": False}
    assert [kind for kind, _, _ in poison.errors.values()] == [ErrorKind.POISON] * 2
    assert (
        "processes died 2 times while they worked on this request, the last time its detokenizer" in poison.errors[0][1]
    )
    assert not other.errors


def test_a_request_that_gets_tokens_survives_any_number_of_deaths() -> None:
    tracker = a_desk(D0)
    client, _ = opened(tracker)
    choice = client.choices[0]
    for number in range(3 * MAX_DEATHS):
        tracker.deltas(deltas((choice, number, [truth("r-0", number)])), D0, 0.0)
        tracker.detokenizer_down(D0, 0.0)
        (send,) = tracker.detokenizer_up(D0)
        assert isinstance(send.message, Submit)
        assert (send.message.attempt, len(ints(send.message.delivered))) == (number + 1, number + 1)
    assert not client.errors


def test_a_request_that_only_waits_outlives_deaths_over_minutes() -> None:
    tracker = a_desk(D0)
    client, _ = opened(tracker)
    for number in range(3 * MAX_DEATHS):
        tracker.detokenizer_down(D0, number * WINDOW_S / (MAX_DEATHS - 1))
        (send,) = tracker.detokenizer_up(D0)
        assert isinstance(send.message, Submit)
        assert send.message.attempt == number + 1
    assert not client.errors


def test_waiting_is_no_attempt() -> None:
    tracker = RequestTracker()
    opened(tracker)
    (send,) = tracker.detokenizer_up(D0)
    assert isinstance(send.message, Submit)
    assert send.message.attempt == 0
    assert tracker.detokenizer_down(D0, 0.0) == []
    (send,) = tracker.detokenizer_up(D1)
    assert isinstance(send.message, Submit)
    assert send.message.attempt == 1


# --- any history ---


class Mesh:
    """Detokenizers that know each request's true tokens, and a tracker between them and its clients."""

    def __init__(self) -> None:
        self.tracker = RequestTracker()
        self.clients: list[Client] = []
        self.up: set[Identity] = set()
        self.streams: dict[Identity, dict[int, tuple[str, int]]] = {}  # handle -> request, tokens generated
        self.said: list[tuple[Identity, TextDeltas]] = []  # everything ever said, to be said again
        self.now = 0.0

    def take(self, sends: list[Send]) -> None:
        self.tracker.check()
        for send in sends:
            assert send.to in self.up, "a message to nobody"
            streams = self.streams[send.to]
            match send.message:
                case Submit() as submit:
                    delivered = ints(submit.delivered)
                    for handle, name in zip(submit.handles, submit.request_ids, strict=True):
                        assert handle not in streams
                        assert delivered == [truth(name, index) for index in range(len(delivered))]
                        streams[handle] = (name, len(delivered))
                case Abort(request_ids=names):
                    self.streams[send.to] = {h: stream for h, stream in streams.items() if stream[0] not in names}
                case Attach() as attach:
                    if attach.handle in streams:
                        self.say(send.to, attach.handle, attach.from_index, streams[attach.handle][1])

    def say(self, sender: Identity, handle: int, start: int, stop: int, end: bool = False) -> None:
        name = self.streams[sender][handle][0]
        row = (handle, start, [truth(name, index) for index in range(start, stop)])
        finished = [Finished(0, FinishReason.LENGTH)] if end else []
        batch = deltas((78, 0, [0]), row) if not end else deltas(row, finished=finished)
        self.said.append((sender, batch))
        self.hear(sender, batch)

    def hear(self, sender: Identity, batch: TextDeltas) -> None:
        self.now += 1.0
        self.take(self.tracker.deltas(batch, sender, self.now))

    def step(self, sender: Identity, handle: int, count: int, lost: bool) -> None:
        name, at = self.streams[sender][handle]
        self.streams[sender][handle] = (name, at + count)
        if not lost:
            self.say(sender, handle, at, at + count)

    def finish(self, sender: Identity, handle: int) -> None:
        at = self.streams[sender][handle][1]
        self.say(sender, handle, at, at)  # shows a gap, if there is one
        self.say(sender, handle, at, at, end=True)
        del self.streams[sender][handle]

    def rise(self, identity: Identity) -> None:
        if identity not in self.up:
            self.up.add(identity)
            self.streams[identity] = {}
            self.take(self.tracker.detokenizer_up(identity))

    def fall(self, identity: Identity) -> None:
        if identity in self.up:
            self.up.remove(identity)
            del self.streams[identity]
            self.take(self.tracker.detokenizer_down(identity, 0.0))

    def open_streams(self) -> list[tuple[Identity, int]]:
        return [(identity, handle) for identity, streams in sorted(self.streams.items()) for handle in streams]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_history_gives_each_client_its_tokens_once_and_one_end(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "PLACED_AT_ONCE", data.draw(st.sampled_from([1, 2, 64])))
        _live_through(data)


def _live_through(data: st.DataObject) -> None:
    draw = data.draw
    mesh = Mesh()
    actions = ["open", "step", "step", "step", "lose", "again", "finish", "reject", "close", "rise", "fall", "expire"]
    actions += ["refuse", "turn"]
    mesh.rise(D0)
    for number in range(draw(st.integers(1, 40))):
        action = draw(st.sampled_from(actions))
        streams = mesh.open_streams()
        if action == "open":
            client, sends = opened(mesh.tracker, f"r{number}", draw(st.integers(1, 3)))
            mesh.clients.append(client)
            mesh.take(sends)
        elif action in ("rise", "fall"):
            getattr(mesh, action)(draw(st.sampled_from([D0, D1, D2])))
        elif action == "turn":
            mesh.take(mesh.tracker.place())
        elif action == "expire":
            for at in (1.0, 2.0 + NEW_S):
                mesh.tracker.expire_orphans(at)
        elif action == "close" and (here := [client for client in mesh.clients if not client.closed]):
            client = draw(st.sampled_from(here))
            sends = mesh.tracker.close(client.choices)
            client.closed = True
            mesh.take(sends)
        elif action == "again" and mesh.said:
            mesh.hear(*draw(st.sampled_from(mesh.said)))
        elif streams:
            sender, handle = draw(st.sampled_from(streams))
            if action == "finish":
                mesh.finish(sender, handle)
            elif action == "reject":
                del mesh.streams[sender][handle]
                mesh.take(mesh.tracker.rejected(Rejected((Handle(handle),), ErrorKind.INTERNAL, "no")))
            elif action == "refuse":
                del mesh.streams[sender][handle]
                mesh.take(mesh.tracker.rejected(Rejected((Handle(handle),), ErrorKind.OVERLOADED, "full")))
            elif action in ("step", "lose"):
                mesh.step(sender, handle, draw(st.integers(1, 3)), lost=action == "lose")
    mesh.rise(D0)
    while mesh.tracker.placement.places_more:
        mesh.take(mesh.tracker.place())
    for sender, handle in mesh.open_streams():
        mesh.finish(sender, handle)
    mesh.tracker.check()
    assert not mesh.tracker.by_handle
    assert not mesh.tracker.orphans
    assert set(mesh.tracker.load.values()) <= {0}
    for client in mesh.clients:
        for choice in client.choices:
            got = client.tokens.get(choice.index, [])
            expected = [truth(choice.submit.request_ids[0], index) for index in range(len(got))]
            assert got == choice.token_ids.tolist() == expected
            assert client.texts.get(choice.index, "") == "".join(map(word, expected))
            assert client.closed or choice.index in client.ends
            assert (choice.index in client.ends) == (choice.finished is not None)


def test_the_logprobs_of_a_request_with_a_key_go_on_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next detokenizer may have to tell them all again, to a frontend that never had them; without a key nobody asks for them."""
    tracker = a_desk(D0)
    client, _ = opened(tracker, n=2)
    with_key, without = client.choices
    with_key.submit = msgspec.structs.replace(with_key.submit, retry=Retry("0" * 32, b"b"))
    some = [PositionLogprobs(TokenLogprob(token, -1.0, 1, word(token), b""), len(word(token))) for token in (1, 2, 3)]
    rows = ((with_key, 0, [1, 2]), (without, 0, [1, 2]))
    tracker.deltas(deltas(*rows, logprobs={0: some[:2], 1: some[:2]}), D0, 1.0)
    tracker.deltas(deltas((with_key, 2, [3]), logprobs={0: some[2:]}), D0, 2.0)
    tracker.deltas(deltas((with_key, 1, [2, 3]), logprobs={0: some[1:]}), D0, 3.0)  # again: not taken in
    tracker.detokenizer_down(D0, 0.0)
    monkeypatch.setattr(text_edge, "PIECE_ENTRIES", 2)
    sent = [send.message for send in tracker.detokenizer_up(D0)]
    told = [message.logprobs for message in sent if isinstance(message, Delivered)]
    assert told == [tuple(some[:2]), tuple(some[2:])], "before its Submit, in pieces"
    submits = [message for message in sent if isinstance(message, Submit)]
    assert [submit.num_logprobs for submit in submits] == [3, 0]
    assert isinstance(sent[-1], Submit)


def test_a_request_with_a_key_keeps_the_time_when_it_was_first_asked() -> None:
    """Each connection's own arrival_s says which is the newer one; the answer's `created` is the first one's."""
    tracker = a_desk(D0)
    client, _ = opened(tracker)
    (choice,) = client.choices
    choice.submit = msgspec.structs.replace(choice.submit, arrival_s=50.0, retry=Retry("0" * 32, b"b"))
    tracker.accepted(Accepted((choice.handle,), 3, arrival_s=20.0))
    tracker.detokenizer_down(D0, 0.0)
    (send,) = tracker.detokenizer_up(D0)
    assert isinstance(send.message, Submit)
    assert send.message.retry is not None
    assert (send.message.arrival_s, send.message.retry.begun_s) == (50.0, 20.0)
