"""Idempotency-Key and Last-Event-ID: what is allowed, and that a stream goes on exactly after the event that the client has."""

import json
from collections.abc import Callable
from typing import Any

import answering
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.frontend.http import retry
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.requests.submits import build_each as build_submits
from meshlm.frontend.requests.submits import position, salt_of
from meshlm.protocol.edges.text import Accepted, Detach, Finished, Submit, TextDeltas, TextPrompt
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Role
from meshlm.runtime.client.placement import Choice, RowDetails
from meshlm.runtime.client.request_tracker import RequestTracker
from meshlm.runtime.process.events import Send

D0, D1 = Identity(Role.DETOKENIZER, 0), Identity(Role.DETOKENIZER, 1)
PATH = "/v1/completions"


def asking(**changes: object) -> ParsedRequest:
    """A streamed one, unless it is changed."""
    streamed: dict[str, Any] = {"is_chat": False, "stream": True, **changes}
    return answering.asking(**streamed)


def read(
    key: str = "k", last_id: str = "", path: str = PATH, api_key: str = "", body: bytes = b"{}"
) -> retry.IdempotencyKey:
    found = retry.read([key], last_id, path, api_key, body)
    assert found is not None
    return found


# --- the key ---


def test_no_key() -> None:
    assert retry.read([], "12", PATH, "", b"{}") is None


@pytest.mark.parametrize("keys", [[""], ["x" * 256], ["a\tb"], ["na\u00efve"], ["a", "a"]])
def test_a_key_that_is_not_allowed_is_named(keys: list[str]) -> None:
    with pytest.raises(HttpError) as caught:
        retry.read(keys, "", PATH, "", b"{}")
    assert (caught.value.status, caught.value.param) == (400, "Idempotency-Key")


def test_a_body_that_is_nested_too_deeply_for_the_stack() -> None:
    with pytest.raises(HttpError, match="nested too deeply") as caught:
        retry.read(["a"], "", PATH, "", b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}")
    assert caught.value.status == 400


def test_what_makes_a_request_the_same() -> None:
    same = read("x" * 255, body=b'{"a": 1, "b": [2]}')
    assert same == read("x" * 255, body=b'{"b":[2],"a":1}')
    assert same.body != read("x" * 255, body=b'{"a": 2, "b": [2]}').body
    names = {
        read("k").key,
        read("l").key,
        read("k", path="/v1/chat/completions").key,
        read("k", api_key="Bearer s").key,
    }
    assert len(names) == 4
    assert all(len(name) == 32 for name in names)


def test_without_a_seed_it_comes_from_the_key() -> None:
    def seeds(again: retry.IdempotencyKey | None, **ask: object) -> list[int]:
        answer: Any = StreamResponse(
            AnswerHead(asking(num_choices=2, **ask), "id", 0, "m", lambda: None), lambda event: None
        )
        handles = iter(range(1, 100))
        list(build_submits(answer, answer.parsed_request, lambda: Handle(next(handles)), -1, again))
        return [choice.submit.sampling.seed for choice in answer.choices]

    assert seeds(read()) == seeds(read()) != seeds(read("other"))
    assert seeds(read(), seed=7) == [7, 8]
    assert seeds(None) != seeds(None)


def test_names_of_requests_are_the_same_each_time() -> None:
    def submits(again: retry.IdempotencyKey) -> list[Submit]:
        ask = asking(prompts=[TextPrompt("a"), TextPrompt("b")], num_choices=2)
        answer: Any = StreamResponse(AnswerHead(ask, f"cmpl-{again.key}", 0, "m", lambda: None), lambda event: None)
        handles = iter(range(1, 100))
        has = position(ask, again)
        assert has is not None
        return [s for _, s in build_submits(answer, ask, lambda: Handle(next(handles)), -1, again, has.cuts)]

    first, second = submits(read()), submits(read(last_id="1--2e-7"))
    assert [submit.request_ids for submit in first] == [submit.request_ids for submit in second]
    assert len({name for submit in first for name in submit.request_ids}) == 4
    assert [submit.retry.cuts for submit in second if submit.retry] == [(1, 0), (2, 7)]


def test_a_key_s_prefixes_have_a_salt_of_their_own() -> None:
    salts = [salt_of("a", ""), salt_of("b", ""), salt_of("a", "x"), salt_of("a\0x", "")]
    assert len(set(salts)) == 4
    assert salts[0] == salt_of("a", ""), "however the key is sent"


# --- ids of events ---


@pytest.mark.parametrize("bad", ["x", "1-2", "1.x", "e", "-1", "1e5", "9" * 10, "\u0663", "1.u.d"])
def test_ids_that_no_event_of_this_stream_has(bad: str) -> None:
    with pytest.raises(HttpError) as caught:
        retry.parse(bad, 1)
    assert (caught.value.status, caught.value.param) == (400, "Last-Event-ID")


def test_a_stream_of_very_many_choices_has_no_ids() -> None:
    assert position(asking(num_choices=65), read()) is None
    assert position(asking(num_choices=64), read()) is not None
    assert position(asking(stream=False), read()) is None
    assert position(asking(), None) is None


Row = tuple[int, list[int], str, bool]  # choice, tokens, text, end


def stream(ask: ParsedRequest, rows: list[Row], last_id: str = "") -> list[tuple[str, str]]:
    """What a client reads: id and data of each event."""
    events: list[bytes] = []
    again = read(last_id=last_id)
    has = position(ask, again)
    assert has is not None
    answer = StreamResponse(AnswerHead(ask, "cmpl-1", 17, "m", lambda: None), events.append, retry.Progress(has))
    handles = iter(range(1, 100))
    list(build_submits(answer, ask, lambda: Handle(next(handles)), -1, again, has.cuts))
    for choice in answer.choices:
        answer.accepted(choice, Accepted((choice.handle,), 2, pack_i32([5, 6]), "Hi you", "Hi", 99.0))
    for index, tokens, text, end in rows:
        choice = answer.choices[index]
        choice.token_ids.extend(tokens)
        details = None
        if end:
            choice.finished = Finished(0, FinishReason.STOP, None, len(choice.token_ids))
            details = RowDetails(choice.finished)
        elif len(choice.token_ids) == len(tokens):
            details = RowDetails(first=First(0))
        answer.row(choice, len(tokens), text, details)
    events.append(answer.last_events())
    found = []
    for event in b"".join(events).decode().split("\n\n"):
        if event:
            name, data = event.split("\n")
            found.append((name.removeprefix("id: "), data.removeprefix("data: ")))
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[ParsedRequest, list[list[Row]]]:
    """For each choice its rows."""
    ask = asking(
        num_choices=draw(st.integers(1, 3)),
        is_chat=draw(st.booleans()),
        include_usage=draw(st.booleans()),
        continuous_usage=draw(st.booleans()),
        return_token_ids=draw(st.booleans()),
    )
    if not ask.answer.is_chat:
        ask = ask.with_answer(echo=draw(st.booleans()))
    rows: list[list[Row]] = []
    for index in range(ask.mesh.num_choices):
        counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        mine: list[Row] = [
            (index, list(range(count)), draw(st.sampled_from(["", "a", "bc", "é\n"])), False) for count in counts
        ]
        mine[-1] = (*mine[-1][:3], True)
        rows.append(mine)
    return ask, rows


def interleaved(draw: Callable[[st.SearchStrategy[Any]], Any], rows: list[list[Row]]) -> list[Row]:
    left = [list(mine) for mine in rows]
    found = []
    while any(left):
        found.append(draw(st.sampled_from([mine for mine in left if mine])).pop(0))
    return found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_resumed_stream_is_what_follows(data: st.DataObject) -> None:
    """Replayed in any interleaving and in other pieces; rows begin at the cuts, as detokenizers see to."""
    ask, rows = data.draw(histories())
    whole = stream(ask, interleaved(data.draw, rows))
    place = data.draw(st.integers(0, len(whole) - 1))
    last_id = whole[place][0]
    again = at_cuts(rows, retry.parse(last_id, ask.mesh.num_choices).cuts)
    resumed = stream(ask, interleaved(data.draw, again), last_id)
    if ask.mesh.num_choices == 1:
        assert resumed == whole[place + 1 :]
    else:
        assert contents(whole[: place + 1] + resumed) == contents(whole)
        names = [name for name, _ in whole[: place + 1] + resumed]
        assert len(set(names)) == len(names)
        assert names[-1] == whole[-1][0]


def at_cuts(rows: list[list[Row]], cuts: tuple[int, ...]) -> list[list[Row]]:
    """Rows as a detokenizer sends them again: what the client has in one piece, and a row that begins where it ends."""
    found: list[list[Row]] = []
    for mine, cut in zip(rows, cuts, strict=True):
        before: list[Row] = []
        after: list[Row] = []
        count = 0
        for row in mine:
            count += len(row[1])
            (before if count <= cut else after).append(row)
        found.append(([merged(before)] if before else []) + after)
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_stream_that_breaks_many_times_is_whole(data: st.DataObject) -> None:
    """Cut anywhere, resumed with the last id, cut again: of each choice every event came once, in its order."""
    ask, rows = data.draw(histories())
    whole = stream(ask, interleaved(data.draw, rows))
    had: list[tuple[str, str]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        last_id = had[-1][0] if had else ""
        again = at_cuts(rows, retry.parse(last_id, ask.mesh.num_choices).cuts)
        events = stream(ask, interleaved(data.draw, again), last_id)
        had += events[: data.draw(st.integers(0, len(events)))]
    last_id = had[-1][0] if had else ""
    had += stream(ask, interleaved(data.draw, at_cuts(rows, retry.parse(last_id, ask.mesh.num_choices).cuts)), last_id)
    assert contents(had) == contents(whole)
    names = [name for name, _ in had]
    assert len(set(names)) == len(names)
    assert names[-1] == whole[-1][0]


def test_an_event_after_a_resume_still_names_what_the_client_had() -> None:
    """Of the choices that have said nothing on the new connection, too."""
    progress = retry.Progress(retry.parse("4-7e-", 3))
    assert progress.event(1, 2, False) is None  # told again
    assert progress.event(0, 5, False) == b"5-7e-"
    assert progress.event(2, 0, False) == b"5-7e-0"
    assert progress.event(1, 7, True) is None
    assert progress.last(2) == b"5-7e-0.d"


def merged(rows: list[Row]) -> Row:
    tokens = [token for row in rows for token in row[1]]
    return rows[0][0], tokens, "".join(row[2] for row in rows), rows[-1][3]


def contents(events: list[tuple[str, str]]) -> dict[int, list[str]]:
    """For each choice its events, less what tells of other choices; -1: the rest."""
    found: dict[int, list[str]] = {}
    for _, data in events:
        frame = json.loads(data) if data != "[DONE]" else {"choices": []}
        if frame["choices"]:
            (choice,) = frame["choices"]
            found.setdefault(choice["index"], []).append(json.dumps(choice))
        else:
            found.setdefault(-1, []).append(data)
    return found


def test_the_first_time_counts_for_created() -> None:
    ((_, first), *_) = stream(asking(is_chat=True), [(0, [1], "a", True)])
    assert json.loads(first)["created"] == 99


def test_the_ids_of_a_chat() -> None:
    ask = asking(is_chat=True, include_usage=True)
    events = stream(ask, [(0, [1], "a", False), (0, [2, 3], "", False), (0, [4], "b", False), (0, [5], "", True)])
    assert [name for name, _ in events] == ["0", "1", "3", "4", "5e", "5e.u", "5e.d"]


# --- the tracker ---


def opened(tracker: RequestTracker, key: str) -> tuple[list[Choice], list[Send]]:
    again = retry.IdempotencyKey(key.ljust(32, "0"), b"", "")
    answer: Any = StreamResponse(
        AnswerHead(asking(num_choices=2), f"cmpl-{key}", 0, "m", lambda: None), lambda event: None
    )
    ((choices, submit),) = list(build_submits(answer, answer.parsed_request, tracker.new_handle, -1, again))
    sends = tracker.open(choices, submit)
    tracker.check()
    return choices, sends


def test_the_key_says_which_detokenizer() -> None:
    homes = []
    for up in ([D0, D1], [D1, D0]):
        tracker = RequestTracker()
        tracker.placement.num_detokenizers = 2
        for one in up:
            tracker.detokenizer_up(one)
        homes.append([opened(tracker, f"{number:08x}")[1][0].to for number in range(6)])
    assert homes[0] == homes[1] == [D0, D1] * 3


def test_tokens_that_another_connection_had_are_not_counted_again() -> None:
    """In rows that end before, at and after the last of them."""
    tracker = RequestTracker()
    tracker.detokenizer_up(D0)
    (first, second), _ = opened(tracker, "0")
    tracker.accepted(Accepted((first.handle, second.handle), 3, num_told=(4, 0)))
    counted = []
    for start, count in ((0, 2), (2, 3), (5, 2)):
        handles, starts = pack_i32([first.handle, second.handle]), pack_i32([start, start])
        counts = pack_i32([count, count])
        tracker.deltas(TextDeltas(handles, starts, counts, pack_i32([7] * 2 * count), ["x", "x"]), D0, 1.0)
        counted.append(tracker.counts[""].num_tokens)
    assert counted == [2, 2 + 3 + 1, 2 + 3 + 1 + 4]


def test_a_key_waits_for_its_detokenizer() -> None:
    tracker = RequestTracker()
    tracker.placement.num_detokenizers = 2
    tracker.detokenizer_up(D0)
    choices, sends = opened(tracker, "00000001")
    assert sends == []
    assert tracker.detokenizer_up(Identity(Role.DETOKENIZER, 2)) == []
    assert [send.to for send in tracker.detokenizer_up(D1)] == [D1, D1]
    assert tracker.detokenizer_down(D1, 0.0) == []
    tracker.check()
    again = tracker.detokenizer_up(D1)
    assert [(send.to, send.message.attempt) for send in again if isinstance(send.message, Submit)] == [(D1, 1)] * 2
    (left,) = tracker.close(choices)
    handles = tuple(choice.handle for choice in choices)
    assert left == Send(D1, Detach(tuple(choice.submit.request_ids[0] for choice in choices), handles))
