"""The routes of this folder: prompts as the mesh is asked them, and answers of token ids that came from elsewhere."""

import asyncio
import time
import uuid
from functools import partial
from types import GenericAlias
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.http.operation import GENERATES, Group, OfClass, route
from meshlm.frontend.openai import limits, parse, render
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, Json, WholeResponse
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.rendering import derender, schema, tokens
from meshlm.frontend.requests.generation import Backend, Form, Generation, ReadRequest
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.protocol.edges.text import Detokenize, Prompt, TextPrompt, Tokenize, TokenPrompt
from meshlm.protocol.wire.columns import pack_i32, unpack_i32


class _BatchResponse(WholeResponse):
    """Many conversations have many prompts: none of them is the answer's own."""

    def _of_prompt(self, choice: Any) -> Json:
        return {}


BATCH = Form(_BatchResponse, StreamResponse)


class Rendering:
    """Of one frontend."""

    routes = OfClass(Group.GENERATION)

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader

    # --- render ---

    @route("/v1/chat/completions/render", answers=schema.RenderedRequest, body=ChatRequest)
    async def chat(self, request: Request) -> HttpResponse:
        """What a conversation asks of POST /inference/v1/generate."""
        parsed_request, model, _ = await self._reader.read(request, self._reader.chat)
        return json_response((await self._rendered(request, parsed_request, model, "chatcmpl-"))[0])

    @route("/v1/completions/render", answers=GenericAlias(list, (schema.RenderedRequest,)), body=CompletionRequest)
    async def completion(self, request: Request) -> HttpResponse:
        """What each prompt asks of POST /inference/v1/generate."""
        parsed_request, model, _ = await self._reader.read(request, self._reader.completion)
        return json_response(await self._rendered(request, parsed_request, model, "cmpl-"))

    async def _rendered(
        self, request: Request, parsed_request: ParsedRequest, model: str, prefix: str
    ) -> list[dict[str, Any]]:
        self._backend.observer.ignored(parsed_request.unknown_fields, request.url.path)
        render.check(parsed_request)
        found = []
        context = self._backend.resolved.max_model_len
        for prompt in parsed_request.mesh.prompts:
            ids, offsets, mask = await self._tokenized(request, prompt, parsed_request)
            name = f"{prefix}{parsed_request.request_id or uuid.uuid4().hex}"
            found.append(render.rendered(parsed_request, name, model, ids, offsets, mask, context))
        return found

    async def _tokenized(
        self, request: Request, prompt: Prompt, parsed_request: ParsedRequest
    ) -> tuple[list[int], list[tuple[int, int]] | None, list[int] | None]:
        """The ids, where each stands in the text, and whether it is the assistant's."""
        if isinstance(prompt, TokenPrompt):
            return unpack_i32(prompt.token_ids).tolist(), None, None
        offsets, mask = parsed_request.answer.return_token_offsets, parsed_request.answer.return_assistant_tokens_mask
        question = Tokenize(self._backend.requests.new_handle(), prompt, want_offsets=offsets, want_assistant_mask=mask)
        reply = await self._reader.ask(request, question)
        ids = unpack_i32(reply.token_ids).tolist()
        found = list(reply.assistant_mask) or None
        if not offsets or (isinstance(prompt, TextPrompt) and prompt.suffix):
            return ids, None, found
        flat = unpack_i32(reply.offsets).tolist()
        return ids, list(zip(flat[::2], flat[1::2], strict=True)), found

    # --- derender ---

    @route("/v1/chat/completions/derender", "", responses.ChatCompletionResponse, schema.DerenderChatRequest)
    async def derender_chat(self, request: Request) -> HttpResponse:
        """A conversation's answer, of its token ids."""
        body, parsed_request = await self._reader.read(request, self._derender_chat)
        return await self._derendered(
            request, parsed_request, [body.generate_response], [body.prompt_tokens or 0], body.model
        )

    def _derender_chat(self, request: Request, raw: bytes) -> tuple[schema.DerenderChatRequest, ParsedRequest]:
        body, unknown = bodies.decode(raw, schema.DerenderChatRequest)
        self._reader.check_model(body.model)
        asked = body.chat_request or ChatRequest(messages=[{"role": "user", "content": ""}])
        parsed_request = parse.chat(asked, unknown, self._backend.resolved, self._backend.config.server)
        parsed_request = derender.plain(parsed_request) if body.chat_request is None else parsed_request
        return body, derender.checked(parsed_request, [body.generate_response], self._backend.resolved.max_model_len)

    @route("/v1/completions/derender", answers=responses.CompletionResponse, body=schema.DerenderCompletionRequest)
    async def derender_completion(self, request: Request) -> HttpResponse:
        """A completion's answer, of its token ids."""
        body, parsed_request = await self._reader.read(request, self._derender_completion)
        counts = body.prompt_tokens or [0] * len(body.generate_responses)
        return await self._derendered(request, parsed_request, body.generate_responses, counts, body.model)

    def _derender_completion(
        self, request: Request, raw: bytes
    ) -> tuple[schema.DerenderCompletionRequest, ParsedRequest]:
        body, unknown = bodies.decode(raw, schema.DerenderCompletionRequest)
        self._reader.check_model(body.model)
        if body.prompt_tokens is not None and len(body.prompt_tokens) != len(body.generate_responses):
            raise field_error("prompt_tokens", "give one number for each of generate_responses")
        asked = body.completion_request or CompletionRequest(prompt="a")
        parsed_request = parse.completion(asked, unknown, self._backend.resolved, self._backend.config.server)
        return body, derender.checked(parsed_request, body.generate_responses, self._backend.resolved.max_model_len)

    async def _derendered(
        self,
        request: Request,
        parsed_request: ParsedRequest,
        found: list[schema.Generated],
        counts: list[int],
        model: str | None,
    ) -> HttpResponse:
        self._backend.observer.ignored(parsed_request.unknown_fields, request.url.path)
        name = found[0].request_id or f"{'chatcmpl-' if parsed_request.answer.is_chat else 'cmpl-'}{uuid.uuid4().hex}"
        served = self._reader.check_model(model)
        head = AnswerHead(parsed_request, name, int(time.time()), served, lambda: None)
        answer = derender.DerenderedResponse(head, found)
        texts: derender.Texts = {}
        if needed := derender.named_ids(found):
            each = Detokenize(self._backend.requests.new_handle(), pack_i32(needed), each=True)
            reply = await self._reader.ask(request, each)
            texts = dict(zip(needed, zip(reply.texts, reply.token_bytes, strict=True), strict=True))
        for prompt_index, one in enumerate(found):
            for entry in one.choices:
                handle, ids = self._backend.requests.new_handle(), derender.ids_of(entry)
                reply = await self._reader.ask(request, Detokenize(handle, ids, parsed_request.mesh.text))
                answer.tell(prompt_index, entry, counts[prompt_index], reply, texts)
        if answer.error is not None:
            raise answer.error
        return HttpResponse(await asyncio.to_thread(answer.body), media_type="application/json")

    # --- generation ---

    @route(
        "/inference/v1/generate",
        "",
        schema.GenerateResponse,
        schema.GenerateRequest,
        parameters=GENERATES,
        streams=True,
    )
    async def generate(self, request: Request) -> HttpResponse:
        """Token ids in, token ids out."""
        read = await self._reader.read(request, self._generate)
        return await self._generation.answer(request, read, "", tokens.TOKENS)

    def _generate(self, request: Request, raw: bytes) -> ReadRequest:
        body, unknown = bodies.decode(raw, schema.GenerateRequest, longest=self._reader.longest)
        model = self._reader.check_model(body.model)
        asked, more = bodies.converted(tokens.completion_of(body), CompletionRequest)
        server, resolved = self._backend.config.server, self._backend.resolved
        unknown = (*unknown, *(f"sampling_params.{name}" for name in more))
        parsed_request = parse.completion(asked, unknown, resolved, server)
        if body.sampling_params.get("max_tokens") is None:
            parsed_request = parsed_request.with_mesh(max_tokens=None)
        return ReadRequest(parsed_request, model, self._reader.idempotency_key(request, raw))

    @route(
        "/v1/chat/completions/batch",
        "",
        responses.ChatCompletionResponse,
        schema.BatchChatRequest,
        parameters=GENERATES,
    )
    async def batch(self, request: Request) -> HttpResponse:
        """Answer several conversations; a choice is one's answer."""
        read = await self._reader.read(request, self._batch)
        return await self._generation.answer(request, read, "chatcmpl-", BATCH)

    def _batch(self, request: Request, raw: bytes) -> ReadRequest:
        resolved = self._backend.resolved
        body, unknown = bodies.decode(raw, schema.BatchChatRequest, partial(limits.check_raw, resolved=resolved))
        model = self._reader.check_model(body.model)
        fields = msgspec.structs.asdict(body)
        parsed_requests = []
        for place, messages in enumerate(body.messages):
            one = ChatRequest(**{**fields, "messages": messages, "use_beam_search": False})
            try:
                parsed_requests.append(parse.chat(one, unknown, resolved, self._backend.config.server))
            except HttpError as error:
                text = f"messages[{place}]: {error.message}" if error.param == "messages" else error.message
                raise HttpError(error.status, text, error.param) from None
        first = parsed_requests[0]
        if any(other.with_mesh(prompts=[]) != first.with_mesh(prompts=[]) for other in parsed_requests):
            raise field_error("continue_final_message", "the conversations' last messages are not the same")
        parsed_request = first.with_mesh(prompts=[parsed_request.mesh.prompts[0] for parsed_request in parsed_requests])
        limits.check(parsed_request.mesh, False, resolved)
        return ReadRequest(parsed_request, model, self._reader.idempotency_key(request, raw))
