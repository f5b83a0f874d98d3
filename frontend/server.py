"""The routes: HTTP requests to exchanges with the mesh and back.

Everything here belongs to one request; state across requests is request_tracker.py's and io.py's (`Backend`).
"""

import asyncio
import contextlib
import random
import time
import uuid
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from meshlm.frontend import bodies, limits, openapi, operating, parse, prompts, retry, submits
from meshlm.frontend.choice import Choice
from meshlm.frontend.endpoint import Endpoint, KeyCheck, plain_error
from meshlm.frontend.errors import HttpError
from meshlm.frontend.fingerprint import system_fingerprint
from meshlm.frontend.http import ByteBudget, EventWriter
from meshlm.frontend.interval import Interval
from meshlm.frontend.load_shedder import LoadShedder
from meshlm.frontend.model_card import model_card
from meshlm.frontend.operations import HTML, METRICS, Operation, served
from meshlm.frontend.request_schema import Served
from meshlm.frontend.responses import Response, WholeResponse
from meshlm.frontend.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meshlm.frontend.stream_response import StreamResponse
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.ids import Handle
from meshlm.protocol.text_edge import Detokenize, DetokenizeReply, Submit, Tokenize, TokenizeReply

BODIES = "this server is reading as many bytes of bodies as it may (--max-incoming-bytes)"
FREE_BODY_BYTES = 64 << 10  # a body's first bytes do not count: small requests are served beside large ones
MANY_CHOICES = 256  # whose answer is written away from the loop


class Backend(operating.Operates, Protocol):
    """What the routes need of the process (io.py)."""

    config: MeshConfig
    resolved: Resolved
    version: str

    def not_ready_reason(self) -> str: ...
    def refusal(self, *, attaches: bool) -> str: ...
    def refused(self, seconds: float) -> None: ...
    async def wait_serving(self) -> str: ...

    draws: random.Random  # of seeds, for requests without one

    def admit(self, ask: parse.ParsedRequest) -> int: ...
    def release(self, cost: int) -> None: ...
    def new_handle(self) -> Handle: ...
    def open(self, choices: list[Choice], submit: Submit) -> None: ...
    def close(self, choices: list[Choice]) -> None: ...
    async def ask(self, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply: ...
    def ignored(self, unknown_fields: tuple[str, ...], path: str) -> None: ...
    def done(self, answer: Response, started: float, path: str, status: int) -> None: ...
    async def load(self) -> int: ...
    async def metrics(self) -> bytes: ...


class Routes:
    """All routes of one frontend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._fingerprint = system_fingerprint(backend.config, backend.version)
        self._incoming = ByteBudget(backend.config.server.max_incoming_bytes)
        self.unsent = ByteBudget(backend.config.server.max_unsent_bytes)

    def app(self) -> Any:
        """The ASGI application: CORS, then the key check, then the gate, then the routes."""
        routes = [
            Route(op.path.replace("{model}", "{model:path}"), Endpoint(getattr(self, op.handler)), methods=op.methods)
            for op in self._operations()
        ]
        server = self._backend.config.server
        cors = Middleware(
            CORSMiddleware,
            allow_origins=server.allowed_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
        )
        keys = tuple(key.encode() for key in server.api_key)
        return Starlette(
            routes=routes,
            middleware=[
                cors,
                Middleware(KeyCheck, keys=keys),
                Middleware(LoadShedder, refusal=self._backend.refusal, refused=self._backend.refused),
            ],
            exception_handlers={HTTPException: plain_error},
        )

    def _operations(self) -> tuple[Operation, ...]:
        server = self._backend.config.server
        return served(documentation=not server.disable_fastapi_docs, development=server.server_dev_mode)

    # --- small routes ---

    async def openapi(self, request: Request) -> HttpResponse:
        return _json(self._document())

    async def docs(self, request: Request) -> HttpResponse:
        return HttpResponse(openapi.page(self._document()), media_type=HTML)

    def _document(self) -> dict[str, Any]:
        keys = bool(self._backend.config.server.api_key)
        return openapi.document(self._operations(), self._backend.version, keys, self._served())

    def _served(self) -> Served:
        server, resolved = self._backend.config.server, self._backend.resolved
        return Served(
            resolved.served_names,
            resolved.spec.vocab_size,
            server.max_logprobs,
            server.enable_auto_tool_choice,
            server.trust_request_chat_template,
            self._backend.config.scheduler.scheduling_policy == "priority",
        )

    async def health(self, request: Request) -> HttpResponse:
        return HttpResponse()

    async def ready(self, request: Request) -> HttpResponse:
        reason = self._backend.not_ready_reason()
        return HttpResponse(reason, 503 if reason else 200, media_type="text/plain")

    async def version(self, request: Request) -> HttpResponse:
        return _json({"version": self._backend.version})

    async def metrics(self, request: Request) -> HttpResponse:
        return HttpResponse(await self._backend.metrics(), media_type=METRICS)

    async def start_profile(self, request: Request) -> HttpResponse:
        return await self._profile(start=True)

    async def stop_profile(self, request: Request) -> HttpResponse:
        return await self._profile(start=False)

    async def _profile(self, *, start: bool) -> HttpResponse:
        return _json(await operating.profile(self._backend, start=start))

    async def reset_prefix_cache(self, request: Request) -> HttpResponse:
        return _json(await operating.reset_prefix_cache(self._backend, request.query_params))

    async def models(self, request: Request) -> HttpResponse:
        entries = [model_card(name, self._backend.resolved) for name in self._backend.resolved.served_names]
        return _json({"object": "list", "data": entries})

    async def model(self, request: Request) -> HttpResponse:
        if not (name := request.path_params["model"]):  # a slash too many
            return await self.models(request)
        return _json(model_card(self._check_model(name), self._backend.resolved))

    async def load(self, request: Request) -> HttpResponse:
        return _json({"server_load": await self._backend.load()})

    async def tokenize(self, request: Request) -> HttpResponse | None:
        body, unknown = bodies.decode(await self._body(request), TokenizeRequest)
        self._backend.ignored(unknown, request.url.path)
        self._check_model(body.model)
        prompt = prompts.of_tokenize(body, self._backend.config.server)
        limits.check_prompt(prompt, False, self._backend.resolved)
        question = Tokenize(self._backend.new_handle(), prompt, bool(body.return_token_strs))
        if (reply := await self._ask(request, question)) is None:
            return None
        assert isinstance(reply, TokenizeReply)
        ids = memoryview(reply.token_ids).cast("i").tolist()
        strings = list(reply.strings) if body.return_token_strs else None
        return _json({"count": len(ids), "max_model_len": reply.max_model_len, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> HttpResponse | None:
        body, unknown = bodies.decode(await self._body(request), DetokenizeRequest)
        self._backend.ignored(unknown, request.url.path)
        self._check_model(body.model)
        limits.check_detokenize(len(body.tokens), self._backend.resolved)
        question = Detokenize(self._backend.new_handle(), pack_i32(body.tokens))
        if (reply := await self._ask(request, question)) is None:
            return None
        assert isinstance(reply, DetokenizeReply)
        return _json({"prompt": reply.text})

    async def _ask(self, request: Request, question: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply | None:
        """The tokenizer's answer; None when the client left before."""
        asked = asyncio.ensure_future(self._backend.ask(question))
        left = asyncio.ensure_future(_disconnected(request))
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
        return reply

    # --- generation ---

    async def completions(self, request: Request) -> HttpResponse | None:
        raw = await self._body(request)
        body, unknown = bodies.decode(raw, CompletionRequest)
        model = self._check_model(body.model)
        ask = parse.completion(body, unknown, self._backend.resolved, self._backend.config.server)
        again = self._again(request, raw)
        del raw, body  # they may be large, and the answer may take long
        return await self._generate(request, ask, model, "cmpl-", again)

    async def chat(self, request: Request) -> HttpResponse | None:
        raw = await self._body(request)
        body, unknown = bodies.decode(raw, ChatRequest)
        model = self._check_model(body.model)
        ask = parse.chat(body, unknown, self._backend.resolved, self._backend.config.server)
        again = self._again(request, raw)
        del raw, body  # they may be large, and the answer may take long
        return await self._generate(request, ask, model, "chatcmpl-", again)

    def _again(self, request: Request, body: bytes) -> retry.IdempotencyKey | None:
        headers = request.headers
        api_key = headers.get("authorization", "") if self._backend.config.server.api_key else ""
        keys, last_id = headers.getlist(retry.KEY), headers.get(retry.LAST_ID, "")
        return retry.read(keys, last_id, request.url.path, api_key, body)

    def _check_model(self, model: str | None) -> str:
        names = self._backend.resolved.served_names
        if model and model not in names:  # an empty name is none, as for vLLM
            text = f"The model `{model}` does not exist; this server has: {', '.join(names)}"
            raise HttpError(404, text, "model", "not_found_error")
        return model or names[0]

    async def _body(self, request: Request) -> bytes:
        """The body, refused as soon as it is too long."""
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
                if size - len(part) < bodies.BEGINNINGS[0] <= size:
                    bodies.check_counts(b"".join(parts))  # before all the rest is read
            return b"".join(parts)
        finally:
            self._incoming.give(held)

    async def _generate(
        self, request: Request, ask: parse.ParsedRequest, model: str, prefix: str, again: retry.IdempotencyKey | None
    ) -> HttpResponse | None:
        backend = self._backend
        if reason := backend.refusal(attaches=again is not None) or await backend.wait_serving():
            raise HttpError(503, reason, kind="overloaded_error")
        if ask.priority and backend.config.scheduler.scheduling_policy != "priority":
            raise HttpError(400, "priority: requests wait in order of arrival (--scheduling-policy)", "priority")
        if len(backend.config.server.api_key) > 1 and backend.config.cache.prefix_caching_per_key:
            salt = submits.salt_of(request.headers.get("authorization", ""), ask.cache_salt)
            ask = ask._replace(cache_salt=salt)
        cost = backend.admit(ask)
        try:
            return await self._answered(request, ask, model, prefix, again)
        finally:
            backend.release(cost)

    async def _answered(
        self, request: Request, ask: parse.ParsedRequest, model: str, prefix: str, again: retry.IdempotencyKey | None
    ) -> HttpResponse | None:
        backend = self._backend
        name = again.key if again else request.headers.get("x-request-id") or ask.request_id or uuid.uuid4().hex
        request_id = prefix + name[:128]
        shown = request.headers.get("x-request-id") or request_id  # a client's own name comes back as it was
        started, created = time.monotonic(), int(time.time())
        end = asyncio.Event()
        writer = EventWriter(dict(request.scope), request.scope["meshlm.send"], self.unsent)
        answer: WholeResponse | StreamResponse
        has = submits.position(ask, again)
        if ask.stream:
            progress = retry.Progress(has) if has else None
            answer = StreamResponse(ask, request_id, created, model, end.set, writer.write, progress)
        else:
            answer = WholeResponse(ask, request_id, created, model, end.set)
        answer.fingerprint = self._fingerprint
        asked: list[tuple[list[Choice], Submit]] = []
        for one in submits.build_each(
            answer,
            ask,
            backend.new_handle,
            submits.dp_rank(request.headers),
            again,
            has.cuts if has is not None else (),
            backend.draws,
        ):
            asked.append(one)
            if len(ask.prompts) > 1:
                await asyncio.sleep(0)  # a large request takes its turn with others' tokens
        if ask.stream and (interval := backend.config.server.stream_interval) > 1:
            spaced = Interval(answer, interval)
            for choice in answer.choices:
                choice.sink = spaced
        status = 200
        try:
            for choices, submit in asked:
                backend.open(choices, submit)
                if len(asked) > 1:
                    await asyncio.sleep(0)
            if ask.stream:
                return await self._stream(request, answer, writer, end, shown)  # type: ignore[arg-type]
            if not await _ended_before_disconnect(request, end):
                status = 499
                return None
            if answer.error is not None:
                raise answer.error
            # A quarter of a second, for as many as there may be.
            long = ask.logprobs >= 0 or ask.prompt_logprobs >= 0 or len(answer.choices) > MANY_CHOICES
            content = await asyncio.to_thread(answer.body) if long else answer.body()  # type: ignore[union-attr]
            return HttpResponse(content, media_type="application/json", headers={"X-Request-Id": shown})
        except HttpError as error:
            status = error.status
            raise
        finally:
            backend.close(answer.choices)
            backend.done(answer, started, request.url.path, status)

    async def _stream(
        self, request: Request, answer: StreamResponse, writer: EventWriter, end: asyncio.Event, shown: str
    ) -> HttpResponse | None:
        """Start with the first news, so that a refusal still has its HTTP status."""
        name = [(b"x-request-id", shown.encode("latin-1", "replace"))]
        pump = asyncio.ensure_future(_first_then_pump(writer, name))
        try:
            if not await _ended_before_disconnect(request, end):
                return None
            if not writer.started and answer.error is not None:
                raise answer.error
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump
            if not writer.started:
                await writer.start(name)
            if events := answer.last_events():
                writer.write(events)
            await writer.finish()
            return _AlreadySent()
        finally:
            pump.cancel()
            writer.release()


async def _first_then_pump(writer: EventWriter, headers: list[tuple[bytes, bytes]]) -> None:
    """Send the headers when the first event waits, then whatever the socket could not take."""
    await writer._wake.wait()
    await writer.start(headers)
    await writer.pump()


async def _ended_before_disconnect(request: Request, end: asyncio.Event) -> bool:
    """Wait for the end of the answer; False when the client leaves first."""
    ended = asyncio.ensure_future(end.wait())
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({ended, left}, return_when=asyncio.FIRST_COMPLETED)
        return ended.done()
    finally:
        ended.cancel()
        left.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Any) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(value), media_type="application/json")


class _AlreadySent(HttpResponse):
    """The response went out through the EventWriter."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Nothing is left to send."""
