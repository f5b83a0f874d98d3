"""The routes of OpenAI's older API for text, and of the tokenizer."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.openai import limits, prompts, schema
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.requests.generation import Backend, Generation
from meshlm.frontend.routes.operation import GENERATES, Group, route
from meshlm.frontend.routes.request_reader import RequestReader
from meshlm.protocol.edges.text import Detokenize, Prompt, Tokenize
from meshlm.protocol.wire.columns import pack_i32

text_route = partial(route, parameters=GENERATES, streams=True, group=Group.GENERATION)


class TextRoutes:
    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader

    @text_route("/v1/chat/completions", "Answer a conversation.", responses.ChatCompletionResponse, schema.ChatRequest)
    async def chat(self, request: Request) -> HttpResponse | None:
        read = await self._reader.read(request, self._reader.chat)
        return await self._generation.answer(request, *read, "chatcmpl-")

    @text_route(
        "/v1/completions", "Complete one prompt or several.", responses.CompletionResponse, schema.CompletionRequest
    )
    async def completions(self, request: Request) -> HttpResponse | None:
        read = await self._reader.read(request, self._reader.completion)
        return await self._generation.answer(request, *read, "cmpl-")

    @route(
        "/tokenize",
        "The token ids of a prompt or of a conversation.",
        responses.TokenizeResponse,
        schema.TokenizeRequest,
    )
    async def tokenize(self, request: Request) -> HttpResponse | None:
        body, unknown, prompt = await self._reader.read(request, self._tokenize)
        self._backend.observer.ignored(unknown, request.url.path)
        question = Tokenize(self._backend.requests.new_handle(), prompt, bool(body.return_token_strs))
        if (reply := await self._reader.ask(request, question)) is None:
            return None
        ids = memoryview(reply.token_ids).cast("i").tolist()
        strings = list(reply.strings) if body.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": reply.max_model_len, "tokens": ids, "token_strs": strings}
        )

    def _tokenize(self, request: Request, raw: bytes) -> tuple[schema.TokenizeRequest, tuple[str, ...], Prompt]:
        check = partial(limits.check_raw_texts, resolved=self._backend.resolved)
        body, unknown = bodies.decode(raw, schema.TokenizeRequest, check)
        self._reader.check_model(body.model)
        prompt = prompts.of_tokenize(body, self._backend.config.server)
        limits.check_prompt(prompt, False, self._backend.resolved)
        return body, unknown, prompt

    @route("/detokenize", "The text of token ids.", responses.DetokenizeResponse, schema.DetokenizeRequest)
    async def detokenize(self, request: Request) -> HttpResponse | None:
        unknown, ids = await self._reader.read(request, self._detokenize)
        self._backend.observer.ignored(unknown, request.url.path)
        question = Detokenize(self._backend.requests.new_handle(), ids)
        if (reply := await self._reader.ask(request, question)) is None:
            return None
        return json_response({"prompt": reply.text})

    def _detokenize(self, request: Request, raw: bytes) -> tuple[tuple[str, ...], bytes]:
        check = partial(limits.check_raw_tokens, resolved=self._backend.resolved)
        body, unknown = bodies.decode(raw, schema.DetokenizeRequest, check, self._reader.longest)
        self._reader.check_model(body.model)
        limits.check_detokenize(len(body.tokens), self._backend.resolved)
        return unknown, pack_i32(body.tokens)
