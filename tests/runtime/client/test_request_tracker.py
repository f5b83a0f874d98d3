"""The tracker with detokenizers that repeat themselves, skip ahead and speak too late."""

from array import array
from typing import Any

import pytest
from answering import OF_PROMPT, asking
from tracker_bench import D0, D1, a_desk, deltas, opened

from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.requests.submits import build_each
from meshlm.protocol.edges.text import (
    Abort,
    Accepted,
    Attach,
    Finished,
    PositionLogprobs,
    Rejected,
    Submit,
    TextDeltas,
    TextPrompt,
    TokenLogprob,
)
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, RequestId
from meshlm.runtime.client.placement import Choice, RowDetails
from meshlm.runtime.client.request_tracker import RequestTracker
from meshlm.runtime.process.events import Send

# --- opening ---


def test_one_submit_for_all_choices_of_a_prompt() -> None:
    tracker = a_desk()
    client, (send,) = opened(tracker, n=3)
    assert send.to == D0
    assert isinstance(send.message, Submit)
    assert send.message.handles == tuple(choice.handle for choice in client.choices) == (1, 2, 3)
    assert tracker.load == {D0: 3}


def test_the_detokenizer_with_the_fewest_open_choices_is_asked() -> None:
    tracker = a_desk(D1, D0)
    asked = [opened(tracker, f"r{n}", n)[1][0].to for n in (2, 1, 1, 1)]
    assert asked == [D0, D1, D1, D0]
    assert tracker.load == {D0: 3, D1: 2}


def test_handles_are_positive_int32() -> None:
    tracker = RequestTracker()
    tracker._next_handle = 0x7FFF_FFFE
    assert [tracker.new_handle(), tracker.new_handle()] == [0x7FFF_FFFF, 1]


# --- tokens ---


def test_plain_rows_come_once_and_in_order() -> None:
    tracker = a_desk()
    one, _ = opened(tracker, "a")
    two, _ = opened(tracker, "b")
    (a,), (b,) = one.choices, two.choices
    assert tracker.deltas(deltas((a, 0, [1]), (b, 0, [5, 6])), D0, 1.0) == []
    assert tracker.deltas(deltas((b, 2, [7]), (a, 1, [2, 3])), D0, 2.0) == []
    assert (one.tokens, two.tokens) == ({0: [1, 2, 3]}, {0: [5, 6, 7]})
    assert (one.texts, two.texts) == ({0: " 1 2 3"}, {0: " 5 6 7"})
    assert one.choices[0].token_ids == array("i", [1, 2, 3])
    assert one.rows == []
    tracker.check()


def test_no_counts_means_one_token_each() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=2)
    both = deltas(*((choice, 0, [9 + choice.index]) for choice in client.choices), counts=b"")
    tracker.deltas(both, D0, 1.0)
    assert client.tokens == {0: [9], 1: [10]}


def test_a_row_brings_what_belongs_to_it() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=2)
    at = [PositionLogprobs(TokenLogprob(1, -0.5, 1, " 1", b" 1"), 2)]
    end = Finished(1, FinishReason.STOP, "x", 1)
    batch = deltas(
        *((choice, 0, [1]) for choice in client.choices),
        finished=[end],
        logprobs={0: at},
        prompt_logprobs={1: OF_PROMPT},
        first={0: First(16, 20, 30)},
    )
    assert tracker.deltas(batch, D0, 1.0) == []
    assert client.rows == [(0, RowDetails(None, at, None, First(16, 20, 30))), (1, RowDetails(end, None, OF_PROMPT))]
    assert client.choices[1].finished == end
    assert tracker.load == {D0: 1}
    tracker.check()


def test_duplicates_are_dropped() -> None:
    tracker = a_desk()
    client, _ = opened(tracker)
    (choice,) = client.choices
    batch = deltas((choice, 0, [1, 2]))
    assert [tracker.deltas(batch, D0, 1.0), tracker.deltas(batch, D0, 2.0), tracker.deltas(batch, D0, 3.0)] == [
        [],
        [],
        [],
    ]
    assert tracker.deltas(deltas((choice, 1, [2])), D0, 4.0) == []
    assert client.tokens == {0: [1, 2]}
    assert client.texts == {0: " 1 2"}
    tracker.deltas(deltas((choice, 2, [3])), D0, 5.0)
    assert client.tokens == {0: [1, 2, 3]}


def test_a_gap_is_asked_for_again_and_loses_nothing() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, "a")
    other, _ = opened(tracker, "b")
    (choice,) = client.choices
    tracker.deltas(deltas((choice, 0, [1, 2])), D0, 1.0)
    sends = tracker.deltas(deltas((choice, 3, [4]), (other.choices[0], 0, [8])), D0, 2.0)
    assert sends == [Send(D0, Attach(choice.handle, RequestId("a-0"), 2))]
    assert (client.tokens, other.tokens) == ({0: [1, 2]}, {0: [8]})
    tracker.deltas(deltas((choice, 2, [3, 4, 5])), D0, 3.0)
    assert client.tokens == {0: [1, 2, 3, 4, 5]}


def test_an_end_behind_a_gap_is_none_yet() -> None:
    tracker = a_desk()
    client, _ = opened(tracker)
    (choice,) = client.choices
    end = Finished(0, FinishReason.LENGTH)
    (send,) = tracker.deltas(deltas((choice, 1, [2]), finished=[end]), D0, 1.0)
    assert send.message == Attach(choice.handle, RequestId("r-0"), 0)
    assert not client.ends
    tracker.deltas(deltas((choice, 0, [1, 2]), finished=[end]), D0, 2.0)
    assert (client.tokens, client.ends) == ({0: [1, 2]}, {0: FinishReason.LENGTH})


def test_rows_of_unknown_handles_do_not_shift_the_others() -> None:
    tracker = a_desk()
    client, _ = opened(tracker)
    tracker.deltas(deltas((77, 0, [1, 2, 3]), (client.choices[0], 0, [4]), (78, 9, [5])), D0, 1.0)
    assert client.tokens == {0: [4]}
    assert tracker.counts[""].num_tokens == 1


def test_columns_of_no_int32_are_an_error() -> None:
    with pytest.raises(ValueError, match="int32"):
        a_desk().deltas(TextDeltas(b"\0", b"", b"", b"", []), D0, 1.0)


def test_times_of_tokens() -> None:
    tracker = a_desk()
    client, _ = opened(tracker)
    (choice,) = client.choices
    for index, now in enumerate((10.0, 10.5, 11.0, 12.0)):
        tracker.deltas(deltas((choice, index, [index])), D0, now)
    assert (choice.first_at, choice.last_at) == (10.0, 12.0)
    assert tracker.counts[""].intervals == {0.5: 2, 1.0: 1}
    assert tracker.counts[""].num_tokens == 4


def test_an_end_without_tokens_is_no_token() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=2)
    none, one = client.choices
    tracker.deltas(deltas((none, 0, []), finished=[Finished(0, FinishReason.ERROR)]), D0, 10.0)
    assert (none.first_at, none.last_at) == (0.0, 0.0)  # "0: none yet"
    tracker.deltas(deltas((one, 0, [1])), D0, 11.0)
    tracker.deltas(deltas((one, 1, []), finished=[Finished(0, FinishReason.STOP)]), D0, 15.0)
    assert (one.first_at, one.last_at) == (11.0, 11.0)
    assert tracker.counts[""].intervals == {}


# --- ends ---


def test_nothing_follows_an_end() -> None:
    tracker = a_desk()
    client, _ = opened(tracker)
    (choice,) = client.choices
    batch = deltas((choice, 0, [1]), finished=[Finished(0, FinishReason.STOP)])
    tracker.deltas(batch, D0, 1.0)
    assert (tracker.by_handle, tracker.load) == ({}, {D0: 0})
    later = deltas((choice, 1, [2]), finished=[Finished(0, FinishReason.LENGTH)])
    assert tracker.deltas(batch, D0, 2.0) == tracker.deltas(later, D0, 2.0) == []
    tracker.rejected(Rejected((choice.handle,), ErrorKind.INTERNAL, "late"))
    assert tracker.detokenizer_down(D0, 0.0) == tracker.close(client.choices) == []
    assert (client.tokens, client.ends, client.errors) == ({0: [1]}, {0: FinishReason.STOP}, {})


def test_rejected_ends_each_choice_once() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=2)
    message = Rejected(tuple(choice.handle for choice in client.choices), ErrorKind.INVALID, "too long", "prompt")
    tracker.rejected(message)
    tracker.rejected(message)
    assert client.errors == dict.fromkeys((0, 1), (ErrorKind.INVALID, "too long", "prompt"))
    assert tracker.load == {D0: 0}
    assert [choice.finished.reason for choice in client.choices if choice.finished] == [FinishReason.ERROR] * 2
    tracker.check()


def test_a_request_is_refused_as_a_whole() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=3)
    first, second, third = (choice.handle for choice in client.choices)
    sends = tracker.rejected(Rejected((second,), ErrorKind.OVERLOADED, "full"))
    assert sends == [Send(D0, Abort((RequestId("r-0"), RequestId("r-2"))))]
    assert client.errors == dict.fromkeys(range(3), (ErrorKind.OVERLOADED, "full", ""))
    assert tracker.rejected(Rejected((first, third), ErrorKind.OVERLOADED, "full")) == []
    assert (tracker.by_handle, tracker.load) == ({}, {D0: 0})
    assert tracker.open(client.choices, client.choices[0].submit) == [], "of another prompt of the same request"
    tracker.check()


def test_a_request_is_let_in_as_a_whole() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=2)
    first, second = client.choices
    tracker.deltas(deltas((first, 0, [1]), finished=[Finished(0, FinishReason.STOP)]), D0, 1.0)
    (send,) = tracker.rejected(Rejected((second.handle,), ErrorKind.OVERLOADED, "full"))
    assert isinstance(send.message, Submit)
    assert (send.to, send.message.request_ids, send.message.attempt) == (D0, (RequestId("r-1"),), 1)
    assert tracker.load == {D0: 1}
    tracker.deltas(deltas((second, 0, [1])), D0, 1.0)
    assert (client.tokens, client.errors) == ({0: [1], 1: [1]}, {})
    tracker.check()


def test_what_is_refused_again_and_again_ends() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=2)
    first, second = client.choices
    tracker.deltas(deltas((first, 0, [1])), D0, 1.0)
    while second.finished is None:
        tracker.rejected(Rejected((second.handle,), ErrorKind.OVERLOADED, "full"))
    assert client.errors[1][:2] == (ErrorKind.OVERLOADED, "full")
    assert second.submit.attempt < 9
    tracker.check()


def test_accepted_reaches_open_choices_only() -> None:
    tracker = a_desk()
    client, _ = opened(tracker, n=2)
    tracker.accepted(Accepted((*(choice.handle for choice in client.choices), Handle(99)), 3))
    assert client.num_accepted == 2
    tracker.close(client.choices)
    client.closed = True
    tracker.accepted(Accepted(tuple(choice.handle for choice in client.choices), 3))


def test_close_aborts_what_still_runs() -> None:
    tracker = a_desk(D0, D1)
    client, _ = opened(tracker, "a", n=2)
    other, _ = opened(tracker, "b")
    first, second = client.choices
    tracker.deltas(deltas((first, 0, [1]), finished=[Finished(0, FinishReason.STOP)]), D0, 1.0)
    assert tracker.close(client.choices) == [Send(D0, Abort((RequestId("a-1"),)))]
    client.closed = True
    tracker.deltas(deltas((second, 0, [1])), D0, 2.0)
    tracker.close(client.choices)
    assert tracker.load == {D0: 0, D1: 1}
    assert list(tracker.by_handle.values()) == other.choices
    tracker.check()


def test_close_names_each_detokenizer_its_own() -> None:
    tracker = a_desk(D0, D1)
    client, _ = opened(tracker, n=3)
    tracker.detokenizer_down(D0, 0.0)
    assert tracker.detokenizer_up(D0) == []
    assert tracker.close(client.choices) == [Send(D1, Abort((RequestId("r-0"), RequestId("r-1"), RequestId("r-2"))))]


def test_choices_that_wait_for_a_detokenizer_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them, when their client leaves: no stream went on meanwhile."""
    tracker = RequestTracker()
    answer: Any = WholeResponse(
        AnswerHead(asking(False, num_choices=8, prompts=[TextPrompt("a")] * 4), "id", 0, "m", lambda: None)
    )
    for choices, submit in list(build_each(answer, answer.parsed_request, tracker.new_handle, -1)):
        assert tracker.open(choices, submit) == []
    assert len(tracker.orphans) == 32
    compared: list[object] = []

    def equal(one: Choice, other: object) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(Choice, "__eq__", equal)
    monkeypatch.setattr(Choice, "__hash__", object.__hash__)
    tracker.expire_orphans(1.0)
    assert tracker.close(answer.choices) == []
    assert not tracker.orphans
    assert len(compared) == 0
