"""The Python API's place in the mesh, a frontend's: submits requests to the detokenizers and collects what comes back.

Owned by llm.py, in whose background loop it lives. It starts and ends no process.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from meshlm.protocol.columns import pack_i32, unpack_i32
from meshlm.protocol.control_edge import MeshStats
from meshlm.protocol.ids import FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.text_edge import (
    Abort,
    Accepted,
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
from meshlm.runtime.errors import LinkDown, LinkFull
from meshlm.runtime.mesh import Mesh
from meshlm.supervisor.outputs import CompletionOutput, RequestOutput, logprobs_of

SENDS_A_TURN = 32  # between two looks at what came back
HOLD_S = 60.0  # how long a question waits for a detokenizer that is started again


def name_of(request_id: str, index: int) -> RequestId:
    """Of one choice, in the mesh."""
    return RequestId(f"{request_id}-{index}")


class Client:
    """All requests of one `LLM`. `serving` is set while requests can be served."""

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.serving = asyncio.Event()
        self._mesh_serves = False
        self._rows: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        self._errors: list[str] = []
        self._asked: dict[int, tuple[Identity, asyncio.Future[TokenizeReply | DetokenizeReply]]] = {}
        self._next = 0
        self._bar: Any = None
        self._all_done: asyncio.Event = asyncio.Event()

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case TextDeltas():
                self._deltas(message)
            case Accepted():
                for handle in message.handles:
                    if handle in self._rows:
                        request = self._rows[handle][0]
                        if message.prompt_token_ids:
                            request.prompt_token_ids = unpack_i32(message.prompt_token_ids).tolist()
                        if message.prompt_text:
                            request.prompt = message.prompt_text
            case Rejected():
                for handle in message.handles:
                    self._errors.append(f"{message.param}: {message.message}" if message.param else message.message)
                    self._end(handle)
            case TokenizeReply() | DetokenizeReply():
                _, future = self._asked.pop(message.handle, (peer, None))
                if future is not None and not future.done():
                    future.set_result(message)
            case MeshStats():
                self._mesh_serves = message.serving
                self._note_serving()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self._note_serving()

    def _note_serving(self) -> None:
        """Requests can be served once the coordinator says so and a detokenizer can be reached from here."""
        if self._mesh_serves and self.mesh is not None and self.mesh.peers(Role.DETOKENIZER):
            self.serving.set()
        else:
            self.serving.clear()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        """What a detokenizer was asked nobody answers any more; the others' part of it is not wanted either."""
        self._note_serving()
        if peer.role is not Role.DETOKENIZER:
            return
        for handle, (asked, future) in list(self._asked.items()):
            if asked == peer:
                del self._asked[handle]
                if not future.done():
                    future.set_exception(ValueError(f"{peer}: {reason}"))
        if self._rows:
            self._errors.append(f"{peer}: {reason}")
            self._abort()
            self._all_done.set()

    def flush(self) -> None:
        """Nothing is batched here."""

    def new_handle(self) -> Handle:
        self._next = self._next % 0x7FFF_FFFF + 1
        return Handle(self._next)

    async def run(self, submits: Iterable[tuple[Submit, RequestOutput]], bar: Any) -> list[RequestOutput]:
        """Send each as soon as it is made; return when all have ended. ValueError with the first refusal.

        When one cannot be made, or nobody waits any more, those before it end, and the error is raised.
        """
        assert self.mesh is not None
        self._bar, self._errors = bar, []
        sent: list[RequestOutput] = []
        try:
            await self._send(submits, sent)
            if self._rows:
                self._all_done.clear()  # those that were sent may all have ended before the next ones were
                await self._all_done.wait()
        except BaseException:
            self._abort()
            raise
        if self._errors:
            raise ValueError(self._errors[0])
        return sent

    async def _detokenizers(self) -> list[Identity]:
        """Those that can be reached, once there is one. ValueError when none is in time."""
        assert self.mesh is not None
        try:
            async with asyncio.timeout(HOLD_S):
                while not (peers := self.mesh.peers(Role.DETOKENIZER)):
                    self.serving.clear()
                    await self.serving.wait()
        except TimeoutError:
            raise ValueError(f"no detokenizer was there for {HOLD_S:.0f} s") from None
        return peers

    async def _send(self, submits: Iterable[tuple[Submit, RequestOutput]], sent: list[RequestOutput]) -> None:
        assert self.mesh is not None
        peers = await self._detokenizers()
        for number, (submit, request) in enumerate(submits):
            self._rows |= {handle: (request, output) for handle, output in zip(submit.handles, request.outputs)}
            sent.append(request)
            self.mesh.send(peers[number % len(peers)], submit)
            if number % SENDS_A_TURN == SENDS_A_TURN - 1:
                await asyncio.sleep(0)
                if self._errors:
                    return  # the caller gets the first one, and no answer

    def _abort(self) -> None:
        """Nobody waits for what was sent."""
        assert self.mesh is not None
        names = tuple(name_of(request.request_id, output.index) for request, output in self._rows.values())
        self._rows.clear()
        for peer in self.mesh.peers(Role.DETOKENIZER):
            with contextlib.suppress(LinkDown, LinkFull):
                self.mesh.send(peer, Abort(names))

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ask a detokenizer for the ids of each prompt. ValueError when it refuses one."""
        (peer, *_) = await self._detokenizers()
        replies = [self._ask(peer, Tokenize(self.new_handle(), prompt)) for prompt in prompts]
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
        (peer, *_) = await self._detokenizers()
        answer = await self._ask(peer, Detokenize(self.new_handle(), pack_i32(token_ids)))
        assert isinstance(answer, DetokenizeReply)
        if answer.error:
            raise ValueError(answer.error)
        return answer.text

    def _ask(self, peer: Identity, message: Tokenize | Detokenize) -> "asyncio.Future[TokenizeReply | DetokenizeReply]":
        assert self.mesh is not None
        future: asyncio.Future[TokenizeReply | DetokenizeReply] = asyncio.get_running_loop().create_future()
        self.mesh.send(peer, message)
        self._asked[message.handle] = (peer, future)
        return future

    def _deltas(self, message: TextDeltas) -> None:
        handles, tokens = unpack_i32(message.handles).tolist(), unpack_i32(message.token_ids)
        counts = unpack_i32(message.counts).tolist() if message.counts else [1] * len(handles)
        finished = {end.row: end for end in message.finished}
        at = 0
        for row, (handle, count) in enumerate(zip(handles, counts, strict=True)):
            known = self._rows.get(handle)
            if known is not None:
                request, output = known
                output.token_ids += tokens[at : at + count].tolist()
                output.text += message.texts[row]
                self._details(message, row, request, output)
                if row in finished:
                    self._finish(handle, output, finished[row])
            at += count

    def _details(self, message: TextDeltas, row: int, request: RequestOutput, output: CompletionOutput) -> None:
        if row in message.logprobs:
            news = message.logprobs[row]
            output.logprobs = (output.logprobs or []) + [logprobs_of(position) for position in news]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(p.token.logprob for p in news)
        if row in message.prompt_logprobs:
            request.prompt_logprobs = [None if p is None else logprobs_of(p) for p in message.prompt_logprobs[row]]
        if row in message.first:
            request.num_cached_tokens = message.first[row].num_cached_tokens

    def _finish(self, handle: int, output: CompletionOutput, end: Finished) -> None:
        output.finish_reason, output.stop_reason = end.reason.value, end.stop_reason
        if end.reason is FinishReason.ERROR:
            self._errors.append(end.message)
        self._end(handle)

    def _end(self, handle: int) -> None:
        del self._rows[handle]
        if self._bar is not None:
            self._bar.update(1)
        if not self._rows:
            self._all_done.set()
