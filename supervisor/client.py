"""The Python API's place in the mesh, a frontend's: submits requests to the detokenizers and collects what comes back.

Owned by llm.py, in whose background loop it lives. It starts and ends no process.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.protocol.columns import unpack_i32
from meshlm.protocol.control_edge import MeshStats
from meshlm.protocol.ids import FinishReason, Handle, Identity, Incarnation, Role
from meshlm.protocol.text_edge import (
    Accepted,
    Finished,
    PositionLogprobs,
    Rejected,
    Submit,
    TextDeltas,
    TextPrompt,
    Tokenize,
    TokenizeReply,
)
from meshlm.runtime.mesh import Mesh


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt's sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs)


class Client:
    """All requests of one `LLM`. `serving` is set once requests can be served."""

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.serving = asyncio.Event()
        self._mesh_serves = False
        self._rows: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        self._errors: list[str] = []
        self._asked: dict[int, asyncio.Future[TokenizeReply]] = {}
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
                        request.prompt_token_ids = unpack_i32(message.prompt_token_ids).tolist()
                        request.prompt = message.prompt_text
            case Rejected():
                for handle in message.handles:
                    self._errors.append(f"{message.param}: {message.message}" if message.param else message.message)
                    self._end(handle)
            case TokenizeReply():
                self._asked.pop(message.handle).set_result(message)
            case MeshStats():
                self._mesh_serves = message.serving
                self._note_serving()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self._note_serving()

    def _note_serving(self) -> None:
        """Requests can be served once the coordinator says so and a detokenizer can be reached from here."""
        if self._mesh_serves and self.mesh is not None and self.mesh.peers(Role.DETOKENIZER):
            self.serving.set()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if peer.role is Role.DETOKENIZER and self._rows:
            self._errors.append(f"{peer}: {reason}")
            for handle in list(self._rows):
                self._end(handle)

    def flush(self) -> None:
        """Nothing is batched here."""

    async def run(self, submits: list[tuple[Submit, RequestOutput]], bar: Any) -> None:
        """Send all; return when all have ended. ValueError with the first refusal."""
        assert self.mesh is not None
        self._bar, self._errors = bar, []
        self._all_done.clear()
        peers = self.mesh.peers(Role.DETOKENIZER)
        for number, (submit, request) in enumerate(submits):
            handles = []
            for output in request.outputs:
                self._next = self._next % 0x7FFF_FFFF + 1
                handles.append(Handle(self._next))
                self._rows[self._next] = (request, output)
            self.mesh.send(peers[number % len(peers)], msgspec.structs.replace(submit, handles=tuple(handles)))
        if self._rows:
            await self._all_done.wait()
        if self._errors:
            raise ValueError(self._errors[0])

    async def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Ask a detokenizer for the ids of each text. ValueError when it refuses one."""
        assert self.mesh is not None
        (peer, *_) = self.mesh.peers(Role.DETOKENIZER)
        replies: list[asyncio.Future[TokenizeReply]] = []
        for text in texts:
            self._next = self._next % 0x7FFF_FFFF + 1
            self._asked[self._next] = future = asyncio.get_running_loop().create_future()
            replies.append(future)
            self.mesh.send(peer, Tokenize(Handle(self._next), TextPrompt(text)))
        found = []
        for reply in replies:
            answer = await reply
            if answer.error:
                raise ValueError(answer.error)
            found.append(unpack_i32(answer.token_ids).tolist())
        return found

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
            output.logprobs = (output.logprobs or []) + message.logprobs[row]
            output.cumulative_logprob = sum(position.token.logprob for position in output.logprobs)
        if row in message.prompt_logprobs:
            request.prompt_logprobs = message.prompt_logprobs[row]
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
