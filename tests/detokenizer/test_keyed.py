"""Requests with an Idempotency-Key: kept when their client goes, taken over by the next connection, forgotten in time."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_bench import LETTERS, TABLE, token_ids

from meshlm.detokenizer import keyed
from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event, PeerLost, PeerUp, Received, Send, Tick
from meshlm.protocol.admit_edge import AbortRequests, Admit, Work
from meshlm.protocol.columns import ints, pack_f32, pack_i32
from meshlm.protocol.ids import COORDINATOR, ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import (
    Abort,
    Accepted,
    Attach,
    Detach,
    Finished,
    PositionLogprobs,
    Rejected,
    Retry,
    Submit,
    TextDeltas,
    TextParams,
    TokenPrompt,
)
from meshlm.protocol.token_edge import Ended, First, LogprobColumns, TokenDeltas

F0, F1, S0 = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1), Identity(Role.SCHEDULER)
WINDOW_S = 60.0
ANSWER = "thequickbrownfox"  # what the scheduler says
LIFE = Incarnation(1)


class Connection:
    """One HTTP request at a frontend, as desk.py keeps it: rows are taken in at the index that follows."""

    def __init__(self, frontend: Identity, handle: int) -> None:
        self.frontend, self.handle = frontend, handle
        self.num_tokens = 0
        self.text = ""
        self.rows: list[tuple[int, str]] = []  # (start, text)
        self.end: Finished | None = None
        self.refused: Rejected | None = None
        self.accepted: Accepted | None = None
        self.logprobs: list[PositionLogprobs] = []
        self.num_of_prompt = 0

    def hear(self, message: object) -> None:
        match message:
            case Accepted() if self.handle in message.handles:
                self.accepted = message
            case Rejected() if self.handle in message.handles:
                self.refused = message
            case TextDeltas():
                self._deltas(message)

    def _deltas(self, batch: TextDeltas) -> None:
        ends = {end.row: end for end in batch.finished}
        handles, starts = ints(batch.handles), ints(batch.starts)
        counts = ints(batch.counts) if batch.counts else [1] * len(handles)
        for row, (handle, start, count) in enumerate(zip(handles, starts, counts, strict=True)):
            if handle != self.handle or start != self.num_tokens:
                continue
            assert self.end is None, "a row after the end"
            assert self.refused is None, "a row after it was refused"
            assert self.accepted is not None, "a row before it was accepted"
            self.num_tokens += count
            self.text += batch.texts[row]
            self.rows.append((start, batch.texts[row]))
            self.logprobs += batch.logprobs.get(row, ())
            self.num_of_prompt += len(batch.prompt_logprobs.get(row, ()))
            self.end = ends.get(row)


class Bench:
    """A detokenizer with a coordinator; schedulers are played here. A check after every event."""

    def __init__(self) -> None:
        self.core = Detokenizer(TABLE, len(LETTERS), 100, WINDOW_S, life=7)
        self.now = 0.0
        self.works: list[Work] = []  # admitted
        self.aborted: set[RequestId] = set()
        self.connections: list[Connection] = []
        self._next_handle = 0
        self._jobs: list[Encode] = []
        self.event(PeerUp(COORDINATOR, LIFE))

    def event(self, event: Event) -> None:
        for effect in self.core.handle(event):
            self._perform(effect)
        self.core.check()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Encode():
                self._jobs.append(effect)
            case Send(to, Admit(work=work)) if to == COORDINATOR:
                self.works.append(work)
            case Send(to, AbortRequests(request_ids)) if to == COORDINATOR:
                self.aborted.update(request_ids)
            case Send(to, message):
                self._told(to, message)

    def _told(self, to: Identity, message: object) -> None:
        for connection in self.connections:
            if connection.frontend == to:
                connection.hear(message)

    def flush(self) -> None:
        for send in self.core.batches():
            self._told(send.to, send.message)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.event(Tick(self.now))

    def ask(
        self,
        frontend: Identity = F0,
        *,
        cut: int = 0,
        body: bytes = b"b",
        name: str = "r",
        logprobs: int = -1,
        stop: tuple[str, ...] = (),
        encode: bool = True,
    ) -> Connection:
        self._next_handle += 1
        connection = Connection(frontend, self._next_handle)
        self.connections.append(connection)
        submit = Submit(
            (Handle(self._next_handle),),
            (RequestId(name),),
            TokenPrompt(pack_i32([1, 2])),
            SamplingParams(logprobs=logprobs),
            TextParams(stop=stop),
            len(ANSWER),
            arrival_s=self.now,
            retry=Retry(name, body, (cut,)),
        )
        self.event(Received(frontend, LIFE, submit))
        if encode:
            self.encode()
        self.flush()
        return connection

    def encode(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            self.event(Encoded(job.job, array("i", [1, 2])))

    def generate(self, work: Work, start: int, end: int, *, logprobs: bool = False, of_prompt: bool = False) -> None:
        ids = token_ids(ANSWER[start:end])
        ended = [Ended(0, FinishReason.LENGTH)] if end == len(ANSWER) else []
        columns = LogprobColumns(0, pack_f32([-1.0] * len(ids)), pack_i32([1] * len(ids)))
        deltas = TokenDeltas(
            pack_i32([work.handle]),
            pack_i32([start]),
            pack_i32([len(ids)]),
            pack_i32(ids),
            ended,
            {0: columns} if logprobs else {},
            {0: LogprobColumns(0, pack_f32([-2.0]), pack_i32([1]))} if of_prompt else {},
            first={0: First(1)} if start == 0 else {},
        )
        self.event(Received(S0, LIFE, deltas))
        self.flush()

    def leave(self, connection: Connection, name: str = "r") -> None:
        self.event(Received(connection.frontend, LIFE, Detach((RequestId(name),), (Handle(connection.handle),))))


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
    assert not bench.core.by_id


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
        logprobs=tuple(first.logprobs),
        arrival_s=77.0,
        retry=Retry("r", b"b", (0,), begun_s=33.0),
    )
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
    assert not bench.core.by_id
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
    assert not bench.core.by_id


def test_finished_ones_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.core.keyed.max_bytes = 10_000
    for number in range(20):
        bench.ask(name=f"r{number}")
        bench.generate(bench.works[-1], 0, len(ANSWER))
    assert 1 < len(bench.core.by_id) < 5
    assert "r19" in bench.core.by_id


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
    assert not bench.core.by_id
    assert bench.core.keyed.num_bytes == 0
