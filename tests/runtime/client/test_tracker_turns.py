"""Many choices of one client: the tracker looks at each a few times, and tells them again in turns, whatever dies meanwhile."""

from collections.abc import Iterator

import msgspec
import pytest
from tracker_bench import D0, D1, Client, a_desk, deltas, opened, word

from meshlm.protocol.edges import text as text_edge
from meshlm.protocol.edges.text import (
    Delivered,
    Detach,
    PositionLogprobs,
    Rejected,
    Retry,
    Submit,
    TextPrompt,
    TokenLogprob,
)
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind, RequestId
from meshlm.runtime.client import placement
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.client.request_tracker import RequestTracker
from meshlm.runtime.process.events import Send


class Watched(list[Choice]):
    """Choices that count how often one of them is looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[Choice]:
        for choice in super().__iter__():
            self.num_looks += 1
            yield choice


@pytest.mark.parametrize("at_once", [True, False])
def test_refusing_many_choices_looks_at_each_a_few_times(at_once: bool) -> None:
    """The first has tokens or the last, which was the worst: each refusal looked at all others."""
    tracker = a_desk(D0)
    client, _ = opened(tracker, n=200)
    client.choices = watched = Watched(client.choices)
    tracker.deltas(deltas((client.choices[-1], 0, [1])), D0, 1.0)
    handles = [choice.handle for choice in watched[:-1]]
    watched.num_looks = 0
    for some in [handles] if at_once else [[handle] for handle in handles]:
        tracker.rejected(Rejected(tuple(some), ErrorKind.OVERLOADED, "full"))
    assert watched.num_looks <= 2 * len(watched)
    assert not client.errors, "they go on: one of them had its place"
    while tracker.placement.places_more:
        tracker.place()
    tracker.check()


class _Looks:
    """Stands for a field of Choice, and counts who reads it."""

    num_looks = 0

    def __get__(self, choice: Choice, kind: type[Choice]) -> Submit:
        self.num_looks += 1
        return Submit((), (), TextPrompt("hi"), SamplingParams())


def test_a_look_at_deadlines_leaves_out_choices_that_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = a_desk(D0)
    patient, _ = opened(tracker, "a", 500, 1000.0)
    opened(tracker, "b", 500)
    late, _ = opened(tracker, "c", 2, 10.0)
    looks = _Looks()
    monkeypatch.setattr(Choice, "submit", looks)
    for _ in range(10):
        tracker.expire(5.0)
    assert looks.num_looks == 0
    monkeypatch.undo()
    assert len(tracker.expire(20.0)) == 1
    assert (len(late.errors), len(patient.errors)) == (2, 0)
    assert len(tracker.close(patient.choices)) == 1
    assert not tracker.deadlines, "kept for requests that are over"


def keyed(tracker: RequestTracker, n: int, num_logprobs: int) -> Client:
    """A client with an Idempotency-Key whose choices each have so many tokens with logprobs."""
    client, _ = opened(tracker, n=n)
    some = [PositionLogprobs(TokenLogprob(token, -1.0, 1, word(token), b""), 2) for token in range(num_logprobs)]
    for choice in client.choices:
        choice.submit = msgspec.structs.replace(choice.submit, retry=Retry("0" * 32, b"b"))
        tracker.deltas(deltas((choice, 0, list(range(num_logprobs))), logprobs={0: some}), D0, 1.0)
    return client


def test_what_was_delivered_is_told_again_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death of its detokenizer; at once it was a second in which no other stream went on."""
    tracker = a_desk(D0)
    monkeypatch.setattr(text_edge, "PIECE_ENTRIES", 4)
    monkeypatch.setattr(placement, "PIECE_ENTRIES", 4)
    client = keyed(tracker, 2, 10)
    assert tracker.detokenizer_down(D0, 0.0) == []
    turns = [tracker.detokenizer_up(D0)]
    while tracker.placement.places_more:
        turns.append(tracker.place())
        tracker.check()
    for turn in turns:
        assert sum(len(send.message.logprobs) for send in turn if isinstance(send.message, Delivered)) <= 4 + 3
    sent = [send.message for turn in turns for send in turn]
    kinds = [type(message) for message in sent]
    assert kinds == [Delivered, Delivered, Delivered, Submit] * 2
    assert {message.request_id for message in sent[:3] if isinstance(message, Delivered)} == {"r-0"}
    assert tracker.load == {D0: 2}
    assert client.errors == {}


def test_many_choices_go_elsewhere_in_turns() -> None:
    tracker = a_desk(D0, D1)
    num_choices = 3 * placement.PLACED_AT_ONCE
    client, _ = opened(tracker, n=num_choices)
    turns = [tracker.detokenizer_down(D0, 0.0)]
    while tracker.placement.places_more:
        turns.append(tracker.place())
    assert [len(turn) for turn in turns] == [placement.PLACED_AT_ONCE] * 3
    assert (tracker.load, client.errors) == ({D1: num_choices}, {})


@pytest.mark.parametrize("how", ["leaves", "dies", "another rises"])
def test_telling_again_that_is_interrupted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = a_desk(D0)
    monkeypatch.setattr(text_edge, "PIECE_ENTRIES", 4)
    monkeypatch.setattr(placement, "PIECE_ENTRIES", 4)
    client = keyed(tracker, 1, 10)
    (choice,) = client.choices
    tracker.detokenizer_down(D0, 0.0)
    (first,) = tracker.detokenizer_up(D0)
    assert isinstance(first.message, Delivered)
    if how == "leaves":
        assert tracker.close(client.choices) == [Send(D0, Detach((RequestId("r-0"),), (choice.handle,)))]
        assert tracker.place() == []
        assert not tracker.placement.places_more
        return
    if how == "dies":
        assert tracker.detokenizer_down(D0, 0.0) == []
        assert not tracker.placement.places_more
        sends, num_pieces = tracker.detokenizer_up(D0), 3
    else:
        sends, num_pieces = tracker.detokenizer_up(D1), 2
    while tracker.placement.places_more:
        sends += tracker.place()
    assert [type(send.message) for send in sends] == [Delivered] * num_pieces + [Submit]
    assert {send.to for send in sends} == {D0}
    tracker.check()
