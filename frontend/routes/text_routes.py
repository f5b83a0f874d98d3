"""The routes of OpenAI's older API for text, of the tokenizer, and of what the server is: models, version, figures, health."""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.operation import ANY_KEY, GENERATES, METRICS, TEXT, Group, route
from meshlm.frontend.observe import information
from meshlm.frontend.openai import limits, prompts, schema
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai.response_fields import model_card
from meshlm.frontend.rendering import schema as rendering
from meshlm.frontend.requests.generation import Backend, Generation
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.edges.text import Detokenize, Prompt, Tokenize
from meshlm.protocol.wire.columns import pack_i32

Asked = tuple[Prompt, list[MediaSource]]
_PROBE = "For load balancers; needs no key."
probe = partial(route, is_open=True, is_probe=True)
text_route = partial(route, parameters=GENERATES, streams=True, group=Group.GENERATION)


class TextRoutes:
    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader

    @text_route("/v1/chat/completions", "Answer a conversation.", responses.ChatCompletionResponse, schema.ChatRequest)
    async def chat(self, request: Request) -> HttpResponse:
        read = await self._reader.read(request, self._reader.chat)
        return await self._generation.answer(request, read, "chatcmpl-")

    @text_route("/v1/completions", answers=responses.CompletionResponse, body=schema.CompletionRequest)
    async def completions(self, request: Request) -> HttpResponse:
        """Complete one prompt or several."""
        read = await self._reader.read(request, self._reader.completion)
        return await self._generation.answer(request, read, "cmpl-")

    @route("/tokenize", answers=responses.TokenizeResponse, body=schema.TokenizeRequest)
    async def tokenize(self, request: Request) -> HttpResponse:
        """The token ids of a prompt or of a conversation."""
        body, unknown, (prompt, media) = await self._reader.read(request, self._tokenize)
        self._backend.observer.ignored(unknown, request.url.path)
        async with self._generation.to_count(request, prompt, media) as whole:
            question = Tokenize(self._backend.requests.new_handle(), whole, bool(body.return_token_strs))
            reply = await self._reader.ask(request, question)
        ids = memoryview(reply.token_ids).cast("i").tolist()
        strings = list(reply.strings) if body.return_token_strs else None
        counts = {"count": len(ids), "max_model_len": reply.max_model_len}
        return json_response({**counts, "tokens": ids, "token_strs": strings})

    def _tokenize(self, request: Request, raw: bytes) -> tuple[schema.TokenizeRequest, tuple[str, ...], Asked]:
        resolved = self._backend.resolved
        check = partial(limits.check_raw_texts, resolved=resolved, vectors=resolved.spec.media is not None)
        body, unknown = bodies.decode(raw, schema.TokenizeRequest, check)
        self._reader.check_model(body.model)
        prompt, media = prompts.of_tokenize(body, self._backend.config.server, resolved.spec.media)
        limits.check_prompt(prompt, False, resolved)
        return body, unknown, (prompt, media)

    @route("/detokenize", "The text of token ids.", responses.DetokenizeResponse, schema.DetokenizeRequest)
    async def detokenize(self, request: Request) -> HttpResponse:
        unknown, ids = await self._reader.read(request, self._detokenize)
        self._backend.observer.ignored(unknown, request.url.path)
        reply = await self._reader.ask(request, Detokenize(self._backend.requests.new_handle(), ids))
        return json_response({"prompt": reply.text})

    def _detokenize(self, request: Request, raw: bytes) -> tuple[tuple[str, ...], bytes]:
        check = partial(limits.check_raw_tokens, resolved=self._backend.resolved)
        body, unknown = bodies.decode(raw, schema.DetokenizeRequest, check, self._reader.longest)
        self._reader.check_model(body.model)
        limits.check_detokenize(len(body.tokens), self._backend.resolved)
        return unknown, pack_i32(body.tokens)


class InformationRoutes:
    def __init__(self, backend: Backend, reader: RequestReader) -> None:
        self._backend, self._reader = backend, reader

    @route("/v1/models", "The served names.", responses.ModelList, key_scope=ANY_KEY)
    async def models(self, request: Request) -> HttpResponse:
        adapters = self._backend.adapters
        entries = [model_card(name, self._backend.resolved, adapters.find(name)) for name in adapters.names]
        return json_response({"object": "list", "data": entries})

    @route("/v1/models/{model}", answers=responses.ModelCard, key_scope=ANY_KEY)
    async def model(self, request: Request) -> HttpResponse:
        """One of them."""
        if not (name := request.path_params["model"]):  # a slash too many
            return await self.models(request)
        served = self._reader.check_model(name)
        return json_response(model_card(served, self._backend.resolved, self._backend.adapters.find(served)))

    @route("/version", "The server's version.", responses.Version, key_scope=ANY_KEY)
    async def version(self, request: Request) -> HttpResponse:
        return json_response({"version": self._backend.version})

    @route("/load", "How many requests are answered now.", responses.ServerLoad, key_scope=ANY_KEY)
    async def load(self, request: Request) -> HttpResponse:
        stats = await self._backend.operations.fresh_stats()
        at_ranks = sum(rank.num_running + rank.num_waiting for rank in stats.ranks)
        return json_response({"server_load": max(self._backend.requests.num_open, stats.num_held + at_ranks)})

    @route("/metrics", "Metrics for Prometheus.", METRICS, key_scope=ANY_KEY)
    async def metrics(self, request: Request) -> HttpResponse:
        stats = await self._backend.operations.fresh_stats()
        return HttpResponse(await self._backend.observer.scrape(stats), media_type=METRICS)

    @probe("/health", f"200 while the process lives. {_PROBE}")
    @probe("/ping", "As /health, for SageMaker.", methods=("GET", "POST"))
    async def health(self, request: Request) -> HttpResponse:
        return HttpResponse()

    @probe("/ready", f"503 with the reason while requests cannot be served. {_PROBE}", TEXT, plain_errors=(503,))
    async def ready(self, request: Request) -> HttpResponse:
        reason = self._backend.readiness.not_ready_reason() or self._backend.readiness.blocked()
        return HttpResponse(reason, 503 if reason else 200, media_type="text/plain")

    @route("/tokenizer_info", answers=rendering.TokenizerInfo, group=Group.TOKENIZER_INFO)
    async def tokenizer_info(self, request: Request) -> HttpResponse:
        """The tokenizer's configuration and template."""
        return json_response(await asyncio.to_thread(information.tokenizer, self._backend.resolved))
