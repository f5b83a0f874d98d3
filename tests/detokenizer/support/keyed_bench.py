"""A detokenizer whose requests have an Idempotency-Key, and their connections."""

from array import array

from journal_bench import LETTERS, TABLE, token_ids

from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event
from meshlm.protocol.edges.admit import AbortRequests, Admit, EngineRequest
from meshlm.protocol.edges.text import (
    Accepted,
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
from meshlm.protocol.edges.token import Ended, First, LogprobColumns, TokenDeltas
from meshlm.protocol.logprobs import positions_of
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_f32, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerUp, Received, Send, Tick

F0, F1, S0 = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1), Identity(Role.SCHEDULER)
WINDOW_S = 60.0
ANSWER = "thequickbrownfox"  # what the scheduler says
LIFE = Incarnation(1)


class Connection:
    """One HTTP request at a frontend, as request_tracker.py keeps it: rows are taken in at the index that follows."""

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
            if row in batch.prompt_logprobs:
                self.num_of_prompt += 1 + len(list(positions_of(batch.prompt_logprobs[row])))
            self.end = ends.get(row)


class Bench:
    """A detokenizer with a coordinator; schedulers are played here. A check after every event."""

    def __init__(self) -> None:
        self.core = Detokenizer(TABLE, len(LETTERS), 100, WINDOW_S, incarnation=7)
        self.now = 0.0
        self.works: list[EngineRequest] = []  # admitted
        self.aborted: set[RequestId] = set()
        self.connections: list[Connection] = []
        self._next_handle = 0
        self.all_turns = True
        self._jobs: list[Encode] = []
        self.event(PeerUp(COORDINATOR, LIFE))

    def event(self, event: Event) -> None:
        for effect in self.core.handle(event, self.now):
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
        """One turn of the loop, or with `all_turns` as many as there is something to tell."""
        for send in self.core.journal.batches():
            self._told(send.to, send.message)
        if self.all_turns and self.core.journal.tells_again:
            self.flush()

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
        bias: dict[int, float] | None = None,
    ) -> Connection:
        self._next_handle += 1
        connection = Connection(frontend, self._next_handle)
        self.connections.append(connection)
        submit = Submit(
            (Handle(self._next_handle),),
            (RequestId(name),),
            TokenPrompt(pack_i32([1, 2])),
            SamplingParams(logprobs=logprobs, logit_bias=bias or {}),
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

    def generate(
        self, work: EngineRequest, start: int, end: int, *, logprobs: bool = False, of_prompt: bool = False
    ) -> None:
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
