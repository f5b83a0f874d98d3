"""What the routes of every API do alike: bodies to parsed requests, the served names, and questions to the tokenizer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar, overload

from starlette.requests import Request

from meshlm.frontend.http import bodies, retry
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.retry import IdempotencyKey
from meshlm.frontend.http.server import ByteBudget
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest
from meshlm.frontend.requests.adapters import UnknownModel
from meshlm.frontend.requests.admission import name_of
from meshlm.frontend.requests.budget import num_tokens
from meshlm.frontend.requests.generation import Backend, ReadRequest, unless_disconnected
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Tokenize, TokenizeReply
from meshlm.runtime.process import in_hand

Parsed = TypeVar("Parsed")
BODIES = "this server is reading as many bytes of bodies as it may (--max-incoming-bytes)"
FREE_BODY_BYTES = 64 << 10  # a body's first bytes do not count: small requests are served beside large ones


class RequestReader:
    """Reads all bodies of one frontend: within the server's limits, and what is large beside the loop.
    `counts_with_answer`: whether a path's tokens count for its key when the answer ends."""

    def __init__(self, backend: Backend, counts_with_answer: Callable[[str], bool]) -> None:
        self._backend, self._counts_with_answer = backend, counts_with_answer
        self._server, self._poison = backend.config.server, backend.poison
        self._incoming = ByteBudget(self._server.max_incoming_bytes)
        self.reads_large = asyncio.Lock()

    async def read(self, request: Request, parse: Callable[[Request, bytes], Parsed]) -> Parsed:
        """What `parse`, which changes nothing, makes of the body. Large ones in a thread, one by one: no stream waits for them."""
        async with self.body(request) as raw, self._poison.turn(name := name_of(request.url.path, raw)):
            for is_last in (False, True):  # the model's name may be an adapter's that is found then
                try:
                    if len(raw) <= bodies.LARGE_BYTES:
                        return in_hand.holding(name, parse, request, raw)
                    async with self.reads_large:
                        return await asyncio.to_thread(in_hand.holding, name, parse, request, raw)
                except RecursionError:  # a body that could just be decoded
                    raise HttpError(400, "the body is nested too deeply") from None
                except UnknownModel as error:
                    if is_last or not await self._backend.resolving.found(error.name, self._backend):
                        raise
            raise AssertionError("the last one returns or raises")

    @asynccontextmanager
    async def body(self, request: Request, is_json: bool = True) -> AsyncIterator[bytes]:
        """The body, refused as soon as it is too long. It counts as incoming until it is read."""
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise HttpError(400, f"the body is sent in the content-encoding {coding[:40]!r}; send it as it is")
        limit = self._server.max_body_bytes
        message = f"the body exceeds {limit} bytes (--max-body-bytes)"
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise HttpError(413, message)
        chunks, size, held = list[bytes](), 0, 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise HttpError(413, message)
                if size > FREE_BODY_BYTES:
                    if not self._incoming.take(len(chunk)):
                        raise HttpError(503, BODIES)
                    held += len(chunk)
                chunks.append(chunk)
                if is_json and size - len(chunk) < bodies.BEGINNINGS[0] <= size:
                    async with self.reads_large:  # before all the rest is read
                        await asyncio.to_thread(bodies.check_counts, b"".join(chunks))
            raw = b"".join(chunks)
            chunks.clear()
            yield raw
        finally:
            if held:
                self._incoming.give(held)

    @property
    def longest(self) -> int:
        """Values that one list of a body may hold."""
        return max(bodies.MAX_IN_LIST, self._backend.resolved.max_model_len)

    def idempotency_key(self, request: Request, body: bytes) -> IdempotencyKey | None:
        keys, last_id = request.headers.getlist(retry.KEY), request.headers.get(retry.LAST_ID, "")
        if not keys:
            return None
        return retry.read(keys, last_id, request.url.path, request.scope.get("meshlm.key", ""), body)

    def check_model(self, model: str | None) -> str:
        """The served name, the base's or an adapter's, or HttpError."""
        return self._backend.adapters.check(model)

    def completion(self, request: Request, raw: bytes) -> ReadRequest:
        resolved, server = self._backend.resolved, self._backend.config.server
        check = partial(limits.check_raw, resolved=resolved)
        body, unknown = bodies.decode(raw, CompletionRequest, check, self.longest)
        model = self.check_model(body.model)
        parsed_request = parse.completion(body, unknown, resolved, server)
        return ReadRequest(parsed_request, model, self.idempotency_key(request, raw))

    def chat(self, request: Request, raw: bytes) -> ReadRequest:
        resolved, server = self._backend.resolved, self._backend.config.server
        check = partial(
            limits.check_raw, resolved=resolved, vectors=server.enable_prompt_embeds or resolved.spec.media is not None
        )
        body, unknown = bodies.decode(raw, ChatRequest, check, self.longest)
        model = self.check_model(body.model)
        parsed_request = parse.chat(body, unknown, resolved, server, media=True)
        return ReadRequest(parsed_request, model, self.idempotency_key(request, raw))

    @overload
    async def ask(self, request: Request, question: Tokenize) -> TokenizeReply: ...
    @overload
    async def ask(self, request: Request, question: Detokenize) -> DetokenizeReply: ...
    async def ask(self, request: Request, question: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        """The tokenizer's answer. ClientDisconnect when the client leaves before."""
        reply = await unless_disconnected(request, self._backend.requests.ask(question))
        if reply.error:
            raise HttpError.of_kind(reply.kind, reply.error, reply.param)
        if not self._counts_with_answer(request.url.path):
            self._backend.observer.rates.used(request.scope.get("meshlm.key", ""), num_tokens(question, reply))
        return reply
