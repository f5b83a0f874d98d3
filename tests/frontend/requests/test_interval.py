"""--stream-interval: the first token at once, then as many as are asked for, and the end; nothing is lost at a cut."""

import json
from typing import Any

from answering import HELLO, LENGTH, WORLD, asking, streamed
from hypothesis import given
from hypothesis import strategies as st

from meshlm.frontend.http import retry
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.requests.pacing import Interval
from meshlm.frontend.requests.submits import build_each, position
from meshlm.protocol.edges.text import Accepted, PositionLogprobs
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, Handle
from meshlm.runtime.client.placement import RowDetails


def feed(spaced: Interval, text: str, end: bool = True, index: int = 0) -> None:
    """One token for each letter, as request_tracker.py hands them on."""
    choice = spaced.choices[index]
    for letter in text:
        choice.token_ids.append(ord(letter))
        spaced.row(choice, 1, letter, RowDetails(first=First(0)) if len(choice.token_ids) == 1 else None)
    if end:
        choice.finished = LENGTH
        spaced.row(choice, 0, "", RowDetails(LENGTH))


def texts(events: list[bytes]) -> list[str]:
    data = [json.loads(event.partition(b"data: ")[2]) for event in events]
    return [chunk["choices"][0]["text"] for chunk in data]


def test_the_first_token_at_once_then_some_together() -> None:
    answer, events, ends = streamed(asking(False))
    feed(Interval(answer, 3), "abcdefghi")
    assert texts(events) == ["a", "bcd", "efg", "hi"]
    assert ends.count == 1


def test_logprobs_come_with_their_text() -> None:
    answer, events, _ = streamed(asking(False, logprobs=1))
    spaced = Interval(answer, 2)
    positions: list[list[PositionLogprobs] | None] = [None, [HELLO], [WORLD]]
    for token, logprobs in enumerate(positions):
        answer.choices[0].token_ids.append(token)
        spaced.row(answer.choices[0], 1, "x", RowDetails(logprobs=logprobs))
    assert json.loads(events[-1].removeprefix(b"data: "))["choices"][0]["logprobs"]["tokens"] == ["Hé", " w"]


def test_a_request_that_fails_has_sent_what_there_was() -> None:
    answer, events, _ = streamed(asking(False))
    spaced = Interval(answer, 10)
    feed(spaced, "abcd", end=False)
    assert texts(events) == ["a"]
    spaced.failed(answer.choices[0], ErrorKind.INTERNAL, "gone", "")
    assert texts(events) == ["a", "bcd"]


@given(st.text("abcdef", min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 12))
def test_a_stream_that_broke_goes_on_with_any_interval(whole: str, before: int, after: int, cut: int) -> None:
    first = stream(whole, before, "")
    kept = first[: min(cut, len(first))]
    last_id = kept[-1].split(b"\n")[0].removeprefix(b"id: ").decode() if kept else ""
    assert "".join(texts(kept + stream(whole, after, last_id))) == whole


def stream(whole: str, interval: int, last_id: str) -> list[bytes]:
    """The events of a connection; its detokenizer begins a row where the client's text ends."""
    events: list[bytes] = []
    again = retry.read(["k"], last_id, "/v1/completions", "", b"{}")
    ask = asking(False, stream=True)
    has = position(ask, again)
    assert has is not None
    answer: Any = StreamResponse(AnswerHead(ask, "cmpl-1", 17, "m", lambda: None), events.append, retry.Progress(has))
    list(build_each(answer, ask, lambda: Handle(1), -1, again, has.cuts))
    answer.accepted(answer.choices[0], Accepted((Handle(1),), 2, pack_i32([5, 6]), "Hi you", "Hi", 99.0))
    feed(Interval(answer, interval), whole)
    return events
