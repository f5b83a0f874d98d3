"""The routes of this folder, beside routes.py's, which gives them its ways to read a body and to ask the mesh (`Reads`)."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.responses import Json, WholeResponse
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.rendering import derender, render, tokens
from meshlm.frontend.rendering.schema import (
    BatchChatRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    Generated,
    GenerateRequest,
)
from meshlm.frontend.requests import retry
from meshlm.frontend.requests.generation import Backend, Form, Generation
from meshlm.protocol.edges.text import Detokenize, Prompt, TextPrompt, Tokenize, TokenizeReply, TokenPrompt
from meshlm.protocol.wire.columns import pack_i32, unpack_i32

Parsed = tuple[parse.ParsedRequest, str, retry.IdempotencyKey | None]


class Reads(NamedTuple):
    """What routes.py does for every route."""

    read: Callable[[Request, Callable[[Request, bytes], Any]], Awaitable[Any]]
    ask: Callable[[Request, Any], Awaitable[Any]]
    chat: Callable[[Request, bytes], Parsed]
    completion: Callable[[Request, bytes], Parsed]
    again: Callable[[Request, bytes], retry.IdempotencyKey | None]
    check_model: Callable[[str | None], str]


class _BatchResponse(WholeResponse):
    """Many conversations have many prompts: none of them is the answer's own."""

    def _of_prompt(self, choice: Any) -> Json:
        return {}


BATCH = Form(_BatchResponse, StreamResponse)


class Rendering:
    """See the module docstring."""

    def __init__(self, backend: Backend, generation: Generation, reads: Reads) -> None:
        self._backend, self._generation, self._reads = backend, generation, reads

    # --- render ---

    async def chat(self, request: Request) -> HttpResponse | None:
        """POST /v1/chat/completions/render."""
        ask, model, _ = await self._reads.read(request, self._reads.chat)
        found = await self._rendered(request, ask, model, "chatcmpl-")
        return None if found is None else _json(found[0])

    async def completion(self, request: Request) -> HttpResponse | None:
        """POST /v1/completions/render."""
        ask, model, _ = await self._reads.read(request, self._reads.completion)
        found = await self._rendered(request, ask, model, "cmpl-")
        return None if found is None else _json(found)

    async def _rendered(
        self, request: Request, ask: parse.ParsedRequest, model: str, prefix: str
    ) -> list[dict[str, Any]] | None:
        self._backend.observer.ignored(ask.unknown_fields, request.url.path)
        render.check(ask)
        found = []
        context = self._backend.resolved.max_model_len
        for prompt in ask.prompts:
            if (tokenized := await self._tokenized(request, prompt, ask)) is None:
                return None
            ids, offsets, mask = tokenized
            name = f"{prefix}{ask.request_id or uuid.uuid4().hex}"
            found.append(render.rendered(ask, name, model, ids, offsets, mask, context))
        return found

    async def _tokenized(
        self, request: Request, prompt: Prompt, ask: parse.ParsedRequest
    ) -> tuple[list[int], list[tuple[int, int]] | None, list[int] | None] | None:
        """The ids, where each stands in the text, and whether it is the assistant's; None when the client left."""
        if isinstance(prompt, TokenPrompt):
            return unpack_i32(prompt.token_ids).tolist(), None, None
        offsets, mask = ask.return_token_offsets, ask.return_assistant_tokens_mask
        question = Tokenize(self._backend.requests.new_handle(), prompt, want_offsets=offsets, want_assistant_mask=mask)
        if (reply := await self._reads.ask(request, question)) is None:
            return None
        assert isinstance(reply, TokenizeReply)
        ids = unpack_i32(reply.token_ids).tolist()
        found = list(reply.assistant_mask) or None
        if not offsets or (isinstance(prompt, TextPrompt) and prompt.suffix):
            return ids, None, found
        flat = unpack_i32(reply.offsets).tolist()
        return ids, list(zip(flat[::2], flat[1::2], strict=True)), found

    # --- derender ---

    async def derender_chat(self, request: Request) -> HttpResponse | None:
        """POST /v1/chat/completions/derender."""
        body, ask = await self._reads.read(request, self._derender_chat)
        return await self._derendered(request, ask, [body.generate_response], [body.prompt_tokens or 0], body.model)

    def _derender_chat(self, request: Request, raw: bytes) -> tuple[DerenderChatRequest, parse.ParsedRequest]:
        body, unknown = bodies.decode(raw, DerenderChatRequest)
        self._reads.check_model(body.model)
        asked = body.chat_request or ChatRequest(messages=[{"role": "user", "content": ""}])
        ask = parse.chat(asked, unknown, self._backend.resolved, self._backend.config.server)
        ask = derender.plain(ask) if body.chat_request is None else ask
        return body, derender.checked(ask, [body.generate_response], self._backend.resolved.max_model_len)

    async def derender_completion(self, request: Request) -> HttpResponse | None:
        """POST /v1/completions/derender."""
        body, ask = await self._reads.read(request, self._derender_completion)
        counts = body.prompt_tokens or [0] * len(body.generate_responses)
        return await self._derendered(request, ask, body.generate_responses, counts, body.model)

    def _derender_completion(
        self, request: Request, raw: bytes
    ) -> tuple[DerenderCompletionRequest, parse.ParsedRequest]:
        body, unknown = bodies.decode(raw, DerenderCompletionRequest)
        self._reads.check_model(body.model)
        if body.prompt_tokens is not None and len(body.prompt_tokens) != len(body.generate_responses):
            raise HttpError(400, "prompt_tokens: give one number for each of generate_responses", "prompt_tokens")
        asked = body.completion_request or CompletionRequest(prompt="a")
        ask = parse.completion(asked, unknown, self._backend.resolved, self._backend.config.server)
        return body, derender.checked(ask, body.generate_responses, self._backend.resolved.max_model_len)

    async def _derendered(
        self, request: Request, ask: parse.ParsedRequest, found: list[Generated], counts: list[int], model: str | None
    ) -> HttpResponse | None:
        self._backend.observer.ignored(ask.unknown_fields, request.url.path)
        name = found[0].request_id or f"{'chatcmpl-' if ask.is_chat else 'cmpl-'}{uuid.uuid4().hex}"
        served = self._reads.check_model(model)
        answer = derender.DerenderedResponse(ask, name, int(time.time()), served, lambda: None, found)
        texts: derender.Texts = {}
        if needed := derender.named_ids(found):
            each = Detokenize(self._backend.requests.new_handle(), pack_i32(needed), each=True)
            if (reply := await self._reads.ask(request, each)) is None:
                return None
            texts = dict(zip(needed, zip(reply.texts, reply.token_bytes, strict=True), strict=True))
        for prompt_index, one in enumerate(found):
            for entry in one.choices:
                ids = derender.ids_of(entry)
                reply = await self._reads.ask(request, Detokenize(self._backend.requests.new_handle(), ids, ask.text))
                if reply is None:
                    return None
                answer.tell(prompt_index, entry, counts[prompt_index], reply, texts)
        if answer.error is not None:
            raise answer.error
        return HttpResponse(await asyncio.to_thread(answer.body), media_type="application/json")

    # --- generation ---

    async def generate(self, request: Request) -> HttpResponse | None:
        """POST /inference/v1/generate."""
        ask, model, again = await self._reads.read(request, self._generate)
        return await self._generation.answer(request, ask, model, "", again, tokens.TOKENS)

    def _generate(self, request: Request, raw: bytes) -> Parsed:
        longest = max(bodies.MAX_IN_LIST, self._backend.resolved.max_model_len)
        body, unknown = bodies.decode(raw, GenerateRequest, longest=longest)
        model = self._reads.check_model(body.model)
        asked, more = bodies.converted(tokens.completion_of(body), CompletionRequest)
        server, resolved = self._backend.config.server, self._backend.resolved
        ask = parse.completion(asked, (*unknown, *(f"sampling_params.{name}" for name in more)), resolved, server)
        if body.sampling_params.get("max_tokens") is None:
            ask = ask._replace(max_tokens=None)
        return ask, model, self._reads.again(request, raw)

    async def batch(self, request: Request) -> HttpResponse | None:
        """POST /v1/chat/completions/batch."""
        ask, model, again = await self._reads.read(request, self._batch)
        return await self._generation.answer(request, ask, model, "chatcmpl-", again, BATCH)

    def _batch(self, request: Request, raw: bytes) -> Parsed:
        resolved = self._backend.resolved
        body, unknown = bodies.decode(raw, BatchChatRequest, partial(limits.check_raw, resolved=resolved))
        model = self._reads.check_model(body.model)
        fields = msgspec.structs.asdict(body)
        asks = []
        for place, messages in enumerate(body.messages):
            one = ChatRequest(**{**fields, "messages": messages, "use_beam_search": False})
            try:
                asks.append(parse.chat(one, unknown, resolved, self._backend.config.server))
            except HttpError as error:
                text = f"messages[{place}]: {error.message}" if error.param == "messages" else error.message
                raise HttpError(error.status, text, error.param) from None
        first = asks[0]
        if any(ask._replace(prompts=[]) != first._replace(prompts=[]) for ask in asks):
            text = "continue_final_message: the conversations' last messages are not the same"
            raise HttpError(400, text, "continue_final_message")
        ask = first._replace(prompts=[ask.prompts[0] for ask in asks])
        limits.check(ask.prompts, ask.sampling, ask.extras, ask.text, ask.cache_salt, len(asks), False, resolved)
        return ask, model, self._reads.again(request, raw)


def _json(value: Any) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(value), media_type="application/json")
