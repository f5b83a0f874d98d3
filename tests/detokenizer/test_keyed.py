"""Requests with an Idempotency-Key: kept when their client goes, taken over by the next connection, forgotten in time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_bench import token_ids
from keyed_bench import ANSWER, F0, F1, LIFE, S0, WINDOW_S, Bench, Connection

from meshlm.detokenizer import keyed
from meshlm.protocol.edges.text import Abort, Attach, Delivered, Detach, Retry, Submit, TokenPrompt
from meshlm.protocol.edges.token import Ended, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, RequestId
from meshlm.runtime.process.events import PeerLost, Received


def test_a_frontends_death_keeps_the_request_and_the_next_one_gets_all() -> None:
    bench = Bench()
    first = bench.ask(F0)
    (work,) = bench.works
    bench.generate(work, 0, 5)
    bench.event(PeerLost(F0, LIFE))
    bench.generate(work, 5, 8)
    second = bench.ask(F1)
    assert (first.text, second.text) == ("thequ", "thequick")
    bench.generate(work, 8, len(ANSWER))
    assert second.text == ANSWER
    assert second.end is not None
    assert bench.works == [work]
    assert not bench.aborted
    assert second.accepted is not None
    assert second.accepted.arrival_s == first.accepted.arrival_s if first.accepted else False


def test_the_next_connection_is_told_what_was_counted_already() -> None:
    """Not what came while nobody was there."""
    bench = Bench()
    bench.ask(F0)
    (work,) = bench.works
    bench.generate(work, 0, 5)
    bench.event(PeerLost(F0, LIFE))
    bench.generate(work, 5, 8)
    told = []
    for connection in (bench.ask(F1), bench.ask(F0)):
        assert connection.accepted is not None
        told.append(connection.accepted.num_told)
    assert told == [(5,), (8,)]
    bench.generate(work, 8, len(ANSWER))
    last = bench.ask(F1)
    assert last.accepted is not None
    assert last.accepted.num_told == (len(ANSWER),)


def test_after_its_detokenizers_death_a_connection_has_what_it_had() -> None:
    """And the one that takes over from it while the prompt is encoded has not to count that."""
    bench = Bench()
    delivered = pack_i32(token_ids(ANSWER[:5]))
    again = Submit(
        (Handle(1),),
        (RequestId("r"),),
        TokenPrompt(pack_i32([1, 2])),
        SamplingParams(),
        max_tokens=len(ANSWER),
        attempt=1,
        delivered=delivered,
        retry=Retry("r", b"b", (0,)),
    )
    bench.event(Received(F0, LIFE, again))
    second = bench.ask(F1)
    assert second.accepted is not None
    assert second.accepted.num_told == (5,)


def test_without_a_key_it_ends_with_its_frontend() -> None:
    bench = Bench()
    submit = Submit((Handle(1),), (RequestId("plain"),), TokenPrompt(pack_i32([1])), SamplingParams())
    bench.event(Received(F0, LIFE, submit))
    bench.encode()
    bench.event(PeerLost(F0, LIFE))
    assert bench.aborted == {"plain"}
    assert not bench.core.journal.by_id


def test_after_its_detokenizers_death_the_next_connection_gets_all_logprobs() -> None:
    """The first five are the frontend's, which had them and is dead when the next one asks."""
    before, bench = Bench(), Bench()
    first = before.ask(F0, logprobs=0)
    before.generate(before.works[0], 0, 5, logprobs=True)
    again = Submit(
        (Handle(first.handle),),
        (RequestId("r"),),
        TokenPrompt(pack_i32([1, 2])),
        SamplingParams(logprobs=0, prompt_logprobs=0),
        max_tokens=len(ANSWER),
        attempt=1,
        delivered=pack_i32(token_ids(ANSWER[:5])),
        num_logprobs=len(first.logprobs),
        arrival_s=77.0,
        retry=Retry("r", b"b", (0,), begun_s=33.0),
    )
    for piece in (first.logprobs[:2], first.logprobs[2:]):
        bench.event(Received(F0, LIFE, Delivered(RequestId("r"), tuple(piece))))
    bench.event(Received(F0, LIFE, again))
    bench.encode()
    (work,) = bench.works
    bench.event(PeerLost(F0, LIFE))
    second = bench.ask(F1, logprobs=0)
    assert not second.rows, "its prompt's logprobs, which begin it, are not there"
    bench.generate(work, 5, 8, logprobs=True, of_prompt=True)
    assert not second.rows
    bench.event(Received(F1, LIFE, Attach(Handle(second.handle), RequestId("r"), 0)))  # it sees the gap
    bench.flush()
    bench.generate(work, 8, len(ANSWER), logprobs=True)
    assert (second.text, len(second.logprobs)) == (ANSWER, len(ANSWER))
    assert second.num_of_prompt == 2
    assert second.accepted is not None
    assert second.accepted.arrival_s == 33.0, "the answer's `created` stays"


def test_a_finished_one_is_told_again_with_its_logprobs() -> None:
    bench = Bench()
    first = bench.ask(logprobs=0)
    bench.generate(bench.works[0], 0, 9, logprobs=True)
    bench.generate(bench.works[0], 9, len(ANSWER), logprobs=True)
    bench.tick(WINDOW_S - 1)
    second = bench.ask(F1)
    assert (second.text, second.logprobs) == (first.text, first.logprobs)
    assert (first.text, len(first.logprobs)) == (ANSWER, len(ANSWER))
    assert second.end is not None
    assert second.end.reason is FinishReason.LENGTH
    assert first.refused is None
    assert len(bench.works) == 1


def test_after_the_window_it_begins_anew() -> None:
    bench = Bench()
    first = bench.ask()
    bench.generate(bench.works[0], 0, 3)
    bench.leave(first)
    bench.tick(WINDOW_S - 1)
    assert not bench.aborted
    bench.tick(1)
    assert bench.aborted == {bench.works[0].request_id}
    assert not bench.core.journal.by_id
    bench.ask()
    assert len(bench.works) == 2
    assert bench.works[1].request_id != bench.works[0].request_id, "schedulers would take it for a repetition"


def test_a_client_that_comes_back_stops_the_clock() -> None:
    bench = Bench()
    bench.leave(bench.ask())
    bench.tick(WINDOW_S - 1)
    bench.ask()
    bench.tick(WINDOW_S)
    assert not bench.aborted


def test_the_older_connection_is_told_and_cannot_take_it_back() -> None:
    bench = Bench()
    older = bench.ask(F0)
    newer = bench.ask(F0)
    assert older.refused is not None
    assert (older.refused.kind, older.refused.message) == (ErrorKind.CONFLICT, keyed.TAKEN_OVER)
    bench.leave(older)  # its hang-up comes late
    bench.event(Received(F0, LIFE, Attach(Handle(older.handle), RequestId("r"), 0)))
    bench.generate(bench.works[0], 0, len(ANSWER))
    assert newer.text == ANSWER


def test_another_body_is_refused_and_harms_nothing() -> None:
    bench = Bench()
    first = bench.ask()
    other = bench.ask(F1, body=b"other")
    assert other.refused is not None
    assert (other.refused.kind, other.refused.param) == (ErrorKind.CONFLICT, "Idempotency-Key")
    bench.generate(bench.works[0], 0, len(ANSWER))
    assert first.text == ANSWER
    bench.tick(WINDOW_S)
    assert bench.ask(body=b"other").refused is None


def test_a_client_that_left_before_its_prompt_was_encoded() -> None:
    bench = Bench()
    bench.leave(bench.ask(encode=False))
    bench.encode()
    assert len(bench.works) == 1
    assert bench.ask(F1).accepted is not None


def test_an_error_is_not_kept() -> None:
    bench = Bench()
    bench.ask()
    work = bench.works[0]
    ended = [Ended(0, FinishReason.ERROR, message="late", kind=ErrorKind.TIMEOUT)]
    deltas = TokenDeltas(pack_i32([work.handle]), pack_i32([0]), pack_i32([0]), b"", ended)
    bench.event(Received(S0, LIFE, deltas))
    assert not bench.core.journal.by_id


def test_finished_ones_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.core.journal.keyed.finished.max_bytes = 10_000
    for number in range(20):
        bench.ask(name=f"r{number}")
        bench.generate(bench.works[-1], 0, len(ANSWER))
    assert 1 < len(bench.core.journal.by_id) < 5
    assert "r19" in bench.core.journal.by_id


def test_what_a_client_listed_counts_as_much_as_its_tokens() -> None:
    """A few hundred bytes of answer kept a logit_bias of megabytes for the whole window."""
    bench = Bench()
    bench.core.journal.keyed.finished.max_bytes = 1 << 20
    for number in range(5):
        bench.ask(name=f"r{number}", bias=dict.fromkeys(range(4000), 1.0))
        bench.generate(bench.works[-1], 0, len(ANSWER))
    assert set(bench.core.journal.by_id) == {"r3", "r4"}


@pytest.mark.parametrize("how", ["detach", "frontend lost"])
def test_those_that_run_without_a_client_take_bounded_memory(how: str) -> None:
    """The oldest are aborted; those whose clients are there do not count."""
    bench = Bench()
    bench.core.journal.keyed.running.max_bytes = 10_000
    connections = [bench.ask(name=f"r{number}") for number in range(20)]
    if how == "detach":
        for number, connection in enumerate(connections):
            bench.leave(connection, f"r{number}")
    else:
        bench.event(PeerLost(F0, LIFE))
    left = set(bench.core.journal.by_id)
    assert 1 < len(left) < 5
    assert "r19" in left
    assert bench.aborted == {work.request_id for work in bench.works} - {
        request.work_id for request in bench.core.journal.by_id.values()
    }


def test_those_that_run_without_a_client_grow() -> None:
    """They were measured when their clients left, and took gigabytes when they had all their log-probabilities."""
    bench = Bench()
    for number in range(5):
        bench.leave(bench.ask(name=f"r{number}", logprobs=0), f"r{number}")
    running = bench.core.journal.keyed.running
    running.max_bytes = running.num_bytes + 1000
    for work in bench.works:
        bench.generate(work, 0, 9, logprobs=True)
    bench.tick(1.0)
    assert set(bench.core.journal.by_id) == {"r1", "r2", "r3", "r4"}
    assert bench.aborted == {bench.works[0].request_id}


def test_an_abort_ends_it_all_the_same() -> None:
    bench = Bench()
    bench.ask()
    bench.event(Received(F0, LIFE, Abort((RequestId("r"),))))
    assert bench.aborted == {bench.works[0].request_id}


def shown_after(count: int, stop: tuple[str, ...]) -> str:
    """The text after so many tokens: an undisturbed client's."""
    bench = Bench()
    client = bench.ask(stop=stop)
    for index in range(count):
        bench.generate(bench.works[0], index, index + 1)
    return client.text


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_each_connection_reads_the_same_text(data: st.DataObject) -> None:
    """Random kills, hang-ups, retries with cuts, batches of tokens: what a connection has is always a beginning of the answer, a row
    begins at its cut, and the last one gets it whole."""
    stop = data.draw(st.sampled_from([(), ("br",), ("kb", "xyz")]))
    whole = shown_after(len(ANSWER), stop)
    bench = Bench()
    current, done = bench.ask(stop=stop), 0
    cuts: list[tuple[Connection, int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["generate", "generate", "lose", "leave", "ask", "tick"]))
        match action:
            case "generate" if done < len(ANSWER):
                end = data.draw(st.integers(done + 1, len(ANSWER)))
                bench.generate(bench.works[-1], done, end)
                done = end
            case "lose":
                bench.event(PeerLost(current.frontend, LIFE))
            case "leave":
                bench.leave(current)
            case "tick":
                bench.tick(1.0)
            case "ask":
                cut = data.draw(st.integers(0, current.num_tokens))
                current = bench.ask(data.draw(st.sampled_from([F0, F1])), cut=cut, stop=stop)
                cuts.append((current, cut))
    last = bench.ask(F1, stop=stop)
    if done < len(ANSWER):
        bench.generate(bench.works[-1], done, len(ANSWER))
    assert len(bench.works) == 1
    assert last.text == whole
    assert last.end is not None
    for connection in bench.connections:
        assert whole.startswith(connection.text)
    for connection, cut in cuts:
        if connection.num_tokens > cut:
            assert any(start == cut for start, _ in connection.rows)
            before = "".join(text for start, text in connection.rows if start < cut)
            assert before == shown_after(cut, stop)
    bench.tick(WINDOW_S)
    assert not bench.core.journal.by_id
    assert bench.core.journal.keyed.finished.num_bytes == bench.core.journal.keyed.running.num_bytes == 0


@pytest.mark.parametrize("how", ["left", "refused"])
def test_what_was_delivered_of_a_request_that_does_not_come_is_not_kept(how: str) -> None:
    """Its client left while it was told, or its key stands for another request."""
    bench = Bench()
    first = bench.ask(F0, logprobs=0)
    bench.generate(bench.works[0], 0, 5, logprobs=True)
    bench.event(Received(F0, LIFE, Delivered(RequestId("r"), tuple(first.logprobs))))
    if how == "left":
        bench.event(Received(F0, LIFE, Detach((RequestId("r"),), (Handle(77),))))
    else:
        body = Submit(
            (Handle(9),), (RequestId("r"),), TokenPrompt(pack_i32([3])), SamplingParams(), retry=Retry("r", b"c")
        )
        bench.event(Received(F0, LIFE, body))
    assert not bench.core._delivered
