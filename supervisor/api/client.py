"""The Python API's place in the mesh, a frontend's: submits requests to the detokenizers and collects what comes back.

Owned by llm.py, in whose background loop it lives. It starts and ends no process. What a detokenizer had when it died is asked of
another one, or of its next incarnation, after the tokens that are here (sequences.py).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from meshlm.protocol.edges.control import MeshStats
from meshlm.protocol.edges.text import (
    Abort,
    Accepted,
    Attach,
    Detokenize,
    DetokenizeReply,
    Finished,
    Prompt,
    Rejected,
    Submit,
    TextDeltas,
    Tokenize,
    TokenizeReply,
)
from meshlm.protocol.logprobs import positions_of
from meshlm.protocol.wire.columns import pack_i32, unpack_i32
from meshlm.protocol.wire.ids import (
    COORDINATOR,
    ErrorKind,
    FinishReason,
    Handle,
    Identity,
    Incarnation,
    RequestId,
    Role,
)
from meshlm.runtime.errors import LinkDown, LinkFull
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.deaths import MAX_DEATHS, Death, one_more, too_many
from meshlm.runtime.process.figures import Figures
from meshlm.supervisor.api.metrics import Counts, Metric
from meshlm.supervisor.api.outputs import RequestOutput, logprobs_of
from meshlm.supervisor.api.placing import Message, Placing
from meshlm.supervisor.api.sequences import Generated, Run

SENDS_A_TURN = 32  # between two looks at what came back


@dataclass
class Question:
    """A question to tokenize or detokenize something, and the detokenizer that has it."""

    message: Tokenize | Detokenize
    answer: "asyncio.Future[TokenizeReply | DetokenizeReply]"
    peer: Identity | None = None
    deaths: tuple[Death, ...] = ()  # that it met


def name_of(request_id: str, index: int) -> RequestId:
    """The request id of one choice in the mesh."""
    return RequestId(f"{request_id}-{index}")


class Client:
    """All requests of one `LLM`. `serving` is set while requests can be served."""

    max_deaths = MAX_DEATHS  # of its detokenizers, after which a sequence is given up

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.serving = asyncio.Event()
        self._mesh_serves = False
        self._rows: dict[int, Generated] = {}
        self._asked: dict[int, Question] = {}
        self._placing = Placing(self)
        self._next = 0
        self.counts, self.figures = Counts(), Figures()

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case TextDeltas():
                self._deltas(message)
            case Accepted():
                for handle in message.handles:
                    if handle in self._rows:
                        self._rows[handle].num_prompt = message.num_prompt_tokens
                        request = self._rows[handle].request
                        if message.prompt_token_ids:
                            request.prompt_token_ids = unpack_i32(message.prompt_token_ids).tolist()
                        if message.prompt_text:
                            request.prompt = message.prompt_text
            case Rejected():
                self._rejected(message)
            case TokenizeReply() | DetokenizeReply():
                question = self._asked.pop(message.handle, None)
                if question is not None and not question.answer.done():
                    question.answer.set_result(message)
            case MeshStats():
                self.figures.take(message)
                self.counts.take(message)
                self._mesh_serves = message.serving
                self._note_serving()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self._note_serving()
        if peer.role is Role.DETOKENIZER:
            self._placing.look_again()

    def _note_serving(self) -> None:
        """Requests can be served once the coordinator says so and a detokenizer can be reached from here."""
        if self._mesh_serves and self.mesh is not None and self.mesh.peers(Role.DETOKENIZER):
            self.serving.set()
        else:
            self.serving.clear()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        """Asks again what the lost detokenizer had."""
        self._note_serving()
        if peer.role is not Role.DETOKENIZER:
            return
        now = time.monotonic()
        in_hand = self.mesh.in_hand_of(peer, incarnation) if self.mesh is not None else ()
        for old in [old for old, row in self._rows.items() if row.peer == peer]:
            row = self._rows[old]
            new = self.new_handle()
            if given_up := row.again(new, now, self.max_deaths, in_hand):
                row.run.errors.append(given_up)
                self._end(old)
            else:
                del self._rows[old]
                self._rows[new] = row
                self._placing.place(row.submit)
        for question in [question for question in self._asked.values() if question.peer == peer]:
            question.deaths = one_more(question.deaths, Role.DETOKENIZER, now)
            if given_up := too_many(question.deaths, self.max_deaths):
                reply = TokenizeReply if isinstance(question.message, Tokenize) else DetokenizeReply
                self.on_message(peer, reply(question.message.handle, error=given_up))
            else:
                self._placing.place(question.message)

    # --- Holder (placing.py) ---

    def has(self, message: Message, peer: Identity | None) -> None:
        """This detokenizer has it now, or none."""
        if isinstance(message, Submit):
            for handle in message.handles:
                self._rows[handle].peer = peer
        else:
            self._asked[message.handle].peer = peer

    def wants(self, message: Message) -> bool:
        """Whether its answer is still waited for."""
        return message.handles[0] in self._rows if isinstance(message, Submit) else message.handle in self._asked

    def too_long(self, message: Message, peer: Identity, text: str) -> None:
        """It can never be sent."""
        if isinstance(message, Submit):
            self._rejected(Rejected(message.handles, ErrorKind.INVALID, text, "prompt"))
        else:
            reply = TokenizeReply if isinstance(message, Tokenize) else DetokenizeReply
            self.on_message(peer, reply(message.handle, error=text))

    def flush(self) -> None:
        """Nothing is batched here."""

    def new_handle(self) -> Handle:
        self._next = self._next % 0x7FFF_FFFF + 1
        return Handle(self._next)

    async def run(
        self,
        submits: Iterable[tuple[Submit, RequestOutput]],
        bar: Any,
        news: Callable[[list[Generated]], None] | None = None,
    ) -> list[RequestOutput]:
        """Send each as soon as it is made; return when all have ended. ValueError with the first refusal. `news`: see Run.

        When one cannot be made, or nobody waits any more, those before it end, and the error is raised.
        """
        assert self.mesh is not None
        run = Run(bar, news)
        sent: list[RequestOutput] = []
        try:
            await self._send(submits, sent, run)
            if run.num_open:
                run.all_done.clear()  # those that were sent may all have ended before the next ones were
                await run.all_done.wait()
        except BaseException:
            self._abort(run)
            raise
        if run.errors:
            raise ValueError(run.errors[0])
        return sent

    async def _send(self, submits: Iterable[tuple[Submit, RequestOutput]], sent: list[RequestOutput], run: Run) -> None:
        for number, (submit, request) in enumerate(submits):
            for choice, handle in enumerate(submit.handles):
                self._rows[handle] = Generated(request, submit, choice, run)
            run.num_open += len(submit.handles)
            sent.append(request)
            self._placing.place(submit)
            if number % SENDS_A_TURN == SENDS_A_TURN - 1:
                await asyncio.sleep(0)

    def _abort(self, run: Run) -> None:
        """Nobody waits for what was sent."""
        assert self.mesh is not None
        left = {handle: row for handle, row in self._rows.items() if row.run is run}
        for handle, row in left.items():
            del self._rows[handle]
            self.counts.given_up(row.engine)
        names = tuple(row.name for row in left.values())
        for peer in self.mesh.peers(Role.DETOKENIZER):
            with contextlib.suppress(LinkDown, LinkFull):
                self.mesh.send(peer, Abort(names))

    async def metrics(self, model: str) -> list[Metric]:
        """What was counted here, and the ranks' figures of this moment."""
        assert self.mesh is not None
        mesh = self.mesh
        return self.counts.snapshot(await self.figures.fresh(lambda ask: mesh.send(COORDINATOR, ask)), model)

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ask a detokenizer for the ids of each prompt. ValueError when it refuses one."""
        replies = [self._ask(Tokenize(self.new_handle(), prompt)) for prompt in prompts]
        found = []
        for reply in replies:
            answer = await reply
            assert isinstance(answer, TokenizeReply)
            if answer.error:
                raise ValueError(answer.error)
            found.append(unpack_i32(answer.token_ids).tolist())
        return found

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. ValueError for one that the vocabulary does not have."""
        answer = await self._ask(Detokenize(self.new_handle(), pack_i32(token_ids)))
        assert isinstance(answer, DetokenizeReply)
        if answer.error:
            raise ValueError(answer.error)
        return answer.text

    def _ask(self, message: Tokenize | Detokenize) -> "asyncio.Future[TokenizeReply | DetokenizeReply]":
        question = self._asked[message.handle] = Question(message, asyncio.get_running_loop().create_future())
        self._placing.place(message)
        return question.answer

    def _deltas(self, message: TextDeltas) -> None:
        handles, starts = unpack_i32(message.handles).tolist(), unpack_i32(message.starts)
        tokens = unpack_i32(message.token_ids)
        counts = unpack_i32(message.counts).tolist() if message.counts else [1] * len(handles)
        finished = {end.row: end for end in message.finished}
        has_details = bool(message.logprobs or message.prompt_logprobs or message.first)
        changed: dict[Run, list[Generated]] = {}  # of those who want to know
        at = 0
        for row, (handle, count) in enumerate(zip(handles, counts, strict=True)):
            known = self._rows.get(handle)
            if known is not None:
                output = known.output
                have = len(output.token_ids)
                if starts[row] == have:
                    output.token_ids += tokens[at : at + count].tolist()
                    output.text += message.texts[row]
                    if has_details:
                        self._details(message, row, known)
                    if known.run.news is not None:
                        changed.setdefault(known.run, []).append(known)
                    if row in finished:
                        output.pooled = message.pooled.get(row, b"")
                        self._finish(handle, known, finished[row])
                elif starts[row] > have:
                    self._attach(handle, known)
            at += count
        for run, rows in changed.items():
            assert run.news is not None
            run.news(rows)

    def _attach(self, handle: int, row: Generated) -> None:
        """A gap: have the rest sent again."""
        assert self.mesh is not None
        if row.peer is not None:
            with contextlib.suppress(LinkDown, LinkFull):
                self.mesh.send(row.peer, Attach(Handle(handle), row.name, len(row.output.token_ids)))

    def _details(self, message: TextDeltas, row: int, known: Generated) -> None:
        request, output = known.request, known.output
        if row in message.logprobs:
            news = message.logprobs[row]
            output.logprobs = (output.logprobs or []) + [logprobs_of(position) for position in news]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(p.token.logprob for p in news)
        if row in message.prompt_logprobs:
            request.prompt_logprobs = [None, *map(logprobs_of, positions_of(message.prompt_logprobs[row]))]
        if row in message.first and not known.begun:  # taken up again, it finds its own tokens
            known.begun, known.first_at = True, time.monotonic()
            request.num_cached_tokens = message.first[row].num_cached_tokens
            waited_s = known.first_at - known.opened_at
            known.engine = self.counts.begun(message.first[row], waited_s, known.num_prompt)

    def _finish(self, handle: int, row: Generated, end: Finished) -> None:
        output = row.output
        output.finish_reason, output.stop_reason = end.reason.value, end.stop_reason
        now, sizes = time.monotonic(), (row.num_prompt, len(output.token_ids))
        self.counts.ended(row.engine, end.reason, sizes, (now - row.opened_at, now - row.first_at))
        if end.reason is FinishReason.ERROR:
            row.run.errors.append(end.message)
        self._end(handle)

    def _rejected(self, message: Rejected) -> None:
        """The mesh refused requests: for lack of space they wait, since nobody is in a hurry; for any other reason they end."""
        for handle in [handle for handle in message.handles if handle in self._rows]:
            row = self._rows[handle]
            if message.kind is ErrorKind.OVERLOADED:
                row.alone(handle)
                self._placing.refused(row.submit)
            else:
                row.run.errors.append(f"{message.param}: {message.message}" if message.param else message.message)
                self._end(handle)

    def _end(self, handle: int) -> None:
        run = self._rows.pop(handle).run
        self._placing.ended()
        run.ended()
