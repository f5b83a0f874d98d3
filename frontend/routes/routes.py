"""The routes: HTTP requests to exchanges with the mesh and back.

Everything here belongs to one request; state across requests is request_tracker.py's and io.py's. generation.py answers completions.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from meshlm.frontend.dashboard.routes import DashboardRoutes
from meshlm.frontend.http import bodies
from meshlm.frontend.http.answer_headers import AnswerHeaders
from meshlm.frontend.http.endpoint import ByMethod, Endpoint, KeyCheck, RootPath, json_response, plain_error
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.load_shedder import LoadShedder
from meshlm.frontend.http.rate_limits import num_tokens
from meshlm.frontend.http.server import ByteBudget
from meshlm.frontend.http.web_pages import WebPages
from meshlm.frontend.messages import routes as anthropic
from meshlm.frontend.observe import information
from meshlm.frontend.openai import limits, parse, prompts
from meshlm.frontend.openai.model_card import model_card
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meshlm.frontend.operator.routes import OperatorRoutes
from meshlm.frontend.rendering.routes import Reads, Rendering
from meshlm.frontend.requests import retry
from meshlm.frontend.requests.generation import Backend, Generation, disconnected
from meshlm.frontend.requests.generative_scoring import Scoring
from meshlm.frontend.requests.poison import name_of
from meshlm.frontend.responses_api import routes as responses_api
from meshlm.frontend.routes import openapi
from meshlm.frontend.routes.operation import HTML, METRICS, Operation
from meshlm.frontend.routes.operations import SUBMITS, served
from meshlm.frontend.routes.request_schema import Served
from meshlm.frontend.speech import routes as speech_routes
from meshlm.frontend.vectors import processed
from meshlm.frontend.vectors import routes as vector_routes
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Prompt, Tokenize, TokenizeReply
from meshlm.protocol.wire.columns import pack_i32
from meshlm.runtime.api_keys import ApiKeys
from meshlm.runtime.process import in_hand

# Of POST /invocations: the field that says which route a body is for; the first that is there counts.
INVOCATIONS = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("query", "/rerank"),
    ("text_1", "/score"),
    ("queries", "/score"),
    ("data_1", "/score"),
    ("task", "/pooling"),
    ("data", "/pooling"),
)
# Where the fields are input or messages: by what the model does unasked.
OF_TASK = {"embed": "/v1/embeddings", "classify": "/classify"}
BODIES = "this server is reading as many bytes of bodies as it may (--max-incoming-bytes)"
FREE_BODY_BYTES = 64 << 10  # a body's first bytes do not count: small requests are served beside large ones

Asked = TypeVar("Asked")
Parsed = tuple[parse.ParsedRequest, str, retry.IdempotencyKey | None]  # with the model's name


class Routes:
    """All routes of one frontend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._incoming = ByteBudget(backend.config.server.max_incoming_bytes)
        self._reads_large = asyncio.Lock()
        self._generation = Generation(backend)
        self.unsent = self._generation.unsent
        self.responses = responses_api.ResponseRoutes(backend, self._generation, self._read)
        reads = Reads(self._read, self._ask, self._chat, self._completion, self._again, self._check_model)
        self.rendering = Rendering(backend, self._generation, reads)
        self.scoring = Scoring(backend.resolved, self._generation, reads)
        of_speech = speech_routes.Reads(partial(self._body, is_json=False), self._again, self._check_model)
        self.speech = speech_routes.SpeechRoutes(backend, self._generation, of_speech)
        self.dashboard = DashboardRoutes(backend.observer)
        self.operator = OperatorRoutes(backend, self._read)
        self.keys = ApiKeys.of_server(backend.config.server)

    def app(self) -> Any:
        """The ASGI application: the answers' own headers, the path of a proxy, what web pages may, CORS, then the key check, then the
        gate, then the routes."""
        paths: dict[str, dict[str, Endpoint]] = {}
        for op in self._operations():
            endpoint = Endpoint(attrgetter(op.handler)(self), self._backend.observer.refused)
            paths.setdefault(op.pattern, {}).update(dict.fromkeys(op.methods, endpoint))
        routes = [Route(path, ByMethod(endpoints), methods=list(endpoints)) for path, endpoints in paths.items()]
        server = self._backend.config.server
        cors = Middleware(
            CORSMiddleware,
            allow_origins=server.cors_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
            allow_private_network=True,
        )
        app = Starlette(
            routes=routes,
            middleware=[
                Middleware(RootPath, root=server.root_path),
                Middleware(WebPages, server=server, refused=self._backend.observer.refused),
                cors,
                Middleware(
                    KeyCheck, keys=self.keys, rates=self._backend.observer.rates, refused=self._backend.observer.refused
                ),
                Middleware(
                    LoadShedder, refusal=self._backend.readiness.refusal, refused=self._backend.observer.refused
                ),
            ],
            exception_handlers={HTTPException: plain_error},
        )
        return AnswerHeaders(app, lambda: self._backend.figures.now, SUBMITS)

    def _operations(self) -> tuple[Operation, ...]:
        server = self._backend.config.server
        return served(
            documentation=not server.disable_fastapi_docs,
            development=server.server_dev_mode,
            pooling=self._backend.resolved.pooling is not None,
            speech=self._backend.resolved.speech is not None,
            tokenizer_info=server.enable_tokenizer_info_endpoint,
            renders_only=self._backend.resolved.renders_only,
            dashboard=server.max_dashboards > 0,
        )

    # --- small routes ---

    async def openapi(self, request: Request) -> HttpResponse:
        return json_response(self._document())

    async def docs(self, request: Request) -> HttpResponse:
        return HttpResponse(openapi.page(self._document()), media_type=HTML, headers=openapi.PAGE_HEADERS)

    def _document(self) -> dict[str, Any]:
        keys = bool(self.keys)
        root = self._backend.config.server.root_path
        return openapi.document(self._operations(), self._backend.version, keys, self._served(), root)

    def _served(self) -> Served:
        server, resolved = self._backend.config.server, self._backend.resolved
        return Served(
            resolved.served_names,
            resolved.spec.vocab_size,
            server.max_logprobs,
            server.enable_auto_tool_choice,
            server.trust_request_chat_template,
            self._backend.config.scheduler.scheduling_policy == "priority",
            bool(server.reasoning_parser),
            server.enable_prompt_embeds,
        )

    async def health(self, request: Request) -> HttpResponse:
        return HttpResponse()

    async def ready(self, request: Request) -> HttpResponse:
        reason = self._backend.readiness.not_ready_reason() or self._backend.readiness.blocked()
        return HttpResponse(reason, 503 if reason else 200, media_type="text/plain")

    async def version(self, request: Request) -> HttpResponse:
        return json_response({"version": self._backend.version})

    async def metrics(self, request: Request) -> HttpResponse:
        return HttpResponse(
            await self._backend.observer.scrape(await self._backend.operations.fresh_stats()), media_type=METRICS
        )

    async def tokenizer_info(self, request: Request) -> HttpResponse:
        return json_response(await asyncio.to_thread(information.tokenizer, self._backend.resolved))

    async def models(self, request: Request) -> HttpResponse:
        entries = [model_card(name, self._backend.resolved) for name in self._backend.resolved.served_names]
        return json_response({"object": "list", "data": entries})

    async def model(self, request: Request) -> HttpResponse:
        if not (name := request.path_params["model"]):  # a slash too many
            return await self.models(request)
        return json_response(model_card(self._check_model(name), self._backend.resolved))

    async def load(self, request: Request) -> HttpResponse:
        stats = await self._backend.operations.fresh_stats()
        at_ranks = sum(rank.num_running + rank.num_waiting for rank in stats.ranks)
        return json_response({"server_load": max(self._backend.requests.num_open, stats.num_held + at_ranks)})

    async def tokenize(self, request: Request) -> HttpResponse | None:
        body, unknown, prompt = await self._read(request, self._tokenize)
        self._backend.observer.ignored(unknown, request.url.path)
        question = Tokenize(self._backend.requests.new_handle(), prompt, bool(body.return_token_strs))
        if (reply := await self._ask(request, question)) is None:
            return None
        assert isinstance(reply, TokenizeReply)
        ids = memoryview(reply.token_ids).cast("i").tolist()
        strings = list(reply.strings) if body.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": reply.max_model_len, "tokens": ids, "token_strs": strings}
        )

    def _tokenize(self, request: Request, raw: bytes) -> tuple[TokenizeRequest, tuple[str, ...], Prompt]:
        check = partial(limits.check_raw_texts, resolved=self._backend.resolved)
        body, unknown = bodies.decode(raw, TokenizeRequest, check)
        self._check_model(body.model)
        prompt = prompts.of_tokenize(body, self._backend.config.server)
        limits.check_prompt(prompt, False, self._backend.resolved)
        return body, unknown, prompt

    async def detokenize(self, request: Request) -> HttpResponse | None:
        unknown, ids = await self._read(request, self._detokenize)
        self._backend.observer.ignored(unknown, request.url.path)
        if (reply := await self._ask(request, Detokenize(self._backend.requests.new_handle(), ids))) is None:
            return None
        assert isinstance(reply, DetokenizeReply)
        return json_response({"prompt": reply.text})

    def _detokenize(self, request: Request, raw: bytes) -> tuple[tuple[str, ...], bytes]:
        check = partial(limits.check_raw_tokens, resolved=self._backend.resolved)
        body, unknown = bodies.decode(raw, DetokenizeRequest, check, self._longest())
        self._check_model(body.model)
        limits.check_detokenize(len(body.tokens), self._backend.resolved)
        return unknown, pack_i32(body.tokens)

    async def _ask(self, request: Request, question: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply | None:
        """The tokenizer's answer; None when the client left before."""
        asked = asyncio.ensure_future(self._backend.requests.ask(question))
        left = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({asked, left}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return None
            reply = await asked
        finally:
            asked.cancel()
            left.cancel()
        if reply.error:
            raise HttpError.of(reply.kind, reply.error, reply.param)
        if request.url.path not in SUBMITS:  # else they count with the answer
            self._backend.observer.rates.used(request.scope.get("meshlm.key", ""), num_tokens(question, reply))
        return reply

    # --- generation ---

    async def invocations(self, request: Request) -> HttpResponse | None:
        """For SageMaker: what the body's fields say."""
        async with self._body(request) as raw:
            fields = bodies.fields_of(raw)
        paths = {op.path: op.handler for op in self._operations()}
        pooling = self._backend.resolved.pooling
        inputs = "" if pooling is None else OF_TASK.get(pooling.tasks[0], "/pooling")
        forms = [one for one in (*INVOCATIONS, ("input", inputs), ("messages", inputs)) if one[1] in paths]
        path = next((path for field, path in forms if field in fields), "")
        if not path:
            wanted = ", ".join(f"{field} ({path})" for field, path in forms)
            raise HttpError(400, f"the body is for no route that is served; it needs one of {wanted}")
        named = Request({**request.scope, "path": path}, request.receive)
        named._body = raw
        answer: HttpResponse | None = await attrgetter(paths[path])(self)(named)
        return answer

    async def completions(self, request: Request) -> HttpResponse | None:
        ask, model, again = await self._read(request, self._completion)
        return await self._generation.answer(request, ask, model, "cmpl-", again)

    def _completion(self, request: Request, raw: bytes) -> Parsed:
        resolved = self._backend.resolved
        body, unknown = bodies.decode(
            raw, CompletionRequest, partial(limits.check_raw, resolved=resolved), self._longest()
        )
        model = self._check_model(body.model)
        ask = parse.completion(body, unknown, resolved, self._backend.config.server)
        return ask, model, self._again(request, raw)

    async def chat(self, request: Request) -> HttpResponse | None:
        ask, model, again = await self._read(request, self._chat)
        return await self._generation.answer(request, ask, model, "chatcmpl-", again)

    def _chat(self, request: Request, raw: bytes) -> Parsed:
        resolved = self._backend.resolved
        vectors = self._backend.config.server.enable_prompt_embeds
        check = partial(limits.check_raw, resolved=resolved, vectors=vectors)
        body, unknown = bodies.decode(raw, ChatRequest, check, self._longest())
        model = self._check_model(body.model)
        ask = parse.chat(body, unknown, resolved, self._backend.config.server)
        return ask, model, self._again(request, raw)

    async def pooling(self, request: Request) -> HttpResponse | None:
        """Vectors, or what a plug-in makes of data and of them."""
        async with self._body(request) as raw:
            has_data = processed.has_data(raw)
        if not has_data:
            request._body = raw
            return await self.vectors(request)
        read = partial(self._vectors, request)
        asked, answer = await asyncio.to_thread(processed.read, raw, self._backend.io_processor, read)
        model = self._check_model(asked.model)
        return await self._generation.answer(request, asked.ask, model, asked.prefix, None, answer.form())

    async def vectors(self, request: Request) -> HttpResponse | None:
        asked = await self._read(request, self._vectors)
        model = self._check_model(asked.model)
        whole = await vector_routes.in_parts(asked, self._backend, partial(self._ask, request))
        if whole is None:
            return None
        return await self._generation.answer(request, whole.ask, model, whole.prefix, None, whole.form())

    def _vectors(self, request: Request, raw: bytes) -> vector_routes.Asked:
        return vector_routes.read(request.url.path, raw, self._longest(), self._backend.config)

    async def messages(self, request: Request) -> HttpResponse | None:
        ask, model, again = await self._read(request, self._messages)
        return await self._generation.answer(request, ask, model, "msg_", again, anthropic.MESSAGES)

    def _messages(self, request: Request, raw: bytes) -> Parsed:
        resolved, server = self._backend.resolved, self._backend.config.server
        check = partial(limits.check_raw_texts, resolved=resolved)
        ask, model = anthropic.read_messages(raw, check, self._longest(), resolved, server)
        anthropic.check_last_id(request.headers.get(retry.LAST_ID, ""))
        return ask, self._check_model(model), self._again(request, raw)

    async def create_response(self, request: Request) -> HttpResponse | None:
        body, again = await self._read(request, self._response)
        return await self.responses.create(request, body, again)

    def _response(self, request: Request, raw: bytes) -> tuple[responses_api.Body, retry.IdempotencyKey | None]:
        check = partial(limits.check_raw_texts, resolved=self._backend.resolved)
        fields, unknown = responses_api.read(raw, check, self._longest())
        anthropic.check_last_id(request.headers.get(retry.LAST_ID, ""))
        model = self._check_model(fields.model)
        return responses_api.Body(fields, unknown, raw, model), self._again(request, raw)

    async def count_tokens(self, request: Request) -> HttpResponse | None:
        ask = await self._read(request, self._count_tokens)
        self._backend.observer.ignored(ask.unknown_fields, request.url.path)
        if (
            reply := await self._ask(request, Tokenize(self._backend.requests.new_handle(), ask.prompts[0], False))
        ) is None:
            return None
        assert isinstance(reply, TokenizeReply)
        count = len(reply.token_ids) // 4
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    def _count_tokens(self, request: Request, raw: bytes) -> parse.ParsedRequest:
        resolved, server = self._backend.resolved, self._backend.config.server
        check = partial(limits.check_raw_texts, resolved=resolved)
        ask, model = anthropic.read_count(raw, check, self._longest(), resolved, server)
        self._check_model(model)
        return ask

    def _longest(self) -> int:
        """Values that one list of a body may hold."""
        return max(bodies.MAX_IN_LIST, self._backend.resolved.max_model_len)

    def _again(self, request: Request, body: bytes) -> retry.IdempotencyKey | None:
        headers = request.headers
        api_key = request.scope.get("meshlm.key", "")
        keys, last_id = headers.getlist(retry.KEY), headers.get(retry.LAST_ID, "")
        return retry.read(keys, last_id, request.url.path, api_key, body)

    def _check_model(self, model: str | None) -> str:
        names = self._backend.resolved.served_names
        if model and model not in names:  # an empty name is none, as for vLLM
            text = f"The model `{model}` does not exist; this server has: {', '.join(names)}"
            raise HttpError(404, text, "model", "not_found_error")
        return model or names[0]

    async def _read(self, request: Request, read: Callable[[Request, bytes], Asked]) -> Asked:
        """What `read`, which changes nothing here, makes of the body. Of a large one in a thread, so that no stream waits for it; one
        after the other."""
        async with self._body(request) as raw, self._backend.poison.turn(name := name_of(request.url.path, raw)):
            if len(raw) <= bodies.LARGE_BYTES:
                return in_hand.holding(name, read, request, raw)
            async with self._reads_large:
                return await asyncio.to_thread(in_hand.holding, name, read, request, raw)

    @asynccontextmanager
    async def _body(self, request: Request, is_json: bool = True) -> AsyncIterator[bytes]:
        """The body, refused as soon as it is too long. It counts as incoming until it is read."""
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise HttpError(400, f"the body is sent in the content-encoding {coding[:40]!r}; send it as it is")
        limit = self._backend.config.server.max_body_bytes
        message = f"the body exceeds {limit} bytes (--max-body-bytes)"
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise HttpError(413, message)
        parts, size, held = [], 0, 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise HttpError(413, message)
                if size > FREE_BODY_BYTES:
                    if not self._incoming.take(len(part)):
                        raise HttpError(503, BODIES, kind="overloaded_error")
                    held += len(part)
                parts.append(part)
                if is_json and size - len(part) < bodies.BEGINNINGS[0] <= size:
                    async with self._reads_large:  # before all the rest is read
                        await asyncio.to_thread(bodies.check_counts, b"".join(parts))
            raw = b"".join(parts)
            parts.clear()
            yield raw
        finally:
            self._incoming.give(held)
