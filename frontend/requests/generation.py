"""One completion, from the parsed request to the last byte of its answer: submitted, awaited or streamed, and closed.

Called by routes.py's routes; what outlives the request is the process's (`Backend`, io.py).
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.endpoints import PluginRoute
from meshlm.frontend.http import retry
from meshlm.frontend.http.endpoint import NAME
from meshlm.frontend.http.errors import HttpError, as_http, field_error
from meshlm.frontend.http.operation import REPLAY
from meshlm.frontend.http.server import EVENTS, ByteBudget, EventWriter
from meshlm.frontend.observe.observer import Observer
from meshlm.frontend.openai.parsed_request import MeshRequest, ParsedRequest
from meshlm.frontend.openai.response_fields import system_fingerprint
from meshlm.frontend.openai.responses import (
    AnswerHead,
    Response,
    StreamedAnswer,
    WholeAnswer,
    WholeResponse,
    trace_headers,
)
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.openai.turn import TurnFormat, TurnResponse
from meshlm.frontend.operator.mesh_operations import MeshOperations
from meshlm.frontend.requests import submits
from meshlm.frontend.requests.adapters import Adapters
from meshlm.frontend.requests.admission import Admission, PoisonBodies, Readiness
from meshlm.frontend.requests.beams import Search
from meshlm.frontend.requests.pacing import Interval, Pace, most_waiting
from meshlm.frontend.requests.resolving import Resolving
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.edges.text import ChatPrompt, MediaPrompt, Prompt, Submit, TextPrompt, TokenPrompt
from meshlm.protocol.extras import generates
from meshlm.protocol.kv_transfer import transfer_of_id
from meshlm.protocol.media import Media
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import logits_processors
from meshlm.runtime.client.draft_metrics import drafts_told
from meshlm.runtime.client.media_client import Held, MediaClient
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.io_processors import IOProcessor
from meshlm.runtime.process.figures import Figures

WRONG_RUNNER = "this server gives vectors, and no text (--runner)"
Prepared = TypeVar("Prepared")
MANY_CHOICES = 256  # whose answer is written away from the loop


class Backend(Protocol):
    """The parts of the process (io.py) that the routes use."""

    config: MeshConfig
    resolved: Resolved
    version: str
    draws: random.Random  # of seeds, for requests without one
    io_processor: IOProcessor | None
    endpoints: tuple[PluginRoute, ...]  # of plug-ins
    poison: PoisonBodies
    figures: Figures
    requests: Admission
    readiness: Readiness
    observer: Observer
    operations: MeshOperations
    adapters: Adapters
    media: MediaClient
    resolving: Resolving


class ReadRequest(NamedTuple):
    """A body that was read: the request, the model's name, and the key by which it may come again."""

    parsed_request: ParsedRequest
    model: str
    idempotency_key: retry.IdempotencyKey | None = None


class Form(NamedTuple):
    """The form of an endpoint's answers, whole and streamed. Both are made of the request, its id, when it came, the model's name and
    what to call at the end; the streamed one also of what writes its events, and of what the client has of them."""

    whole: Callable[[AnswerHead], WholeAnswer]
    stream: Callable[[AnswerHead, Callable[[bytes], None], retry.Progress | None], StreamedAnswer]
    id_headers: tuple[str, ...] = ("X-Request-Id",)  # with the name of the request
    media_type: str = EVENTS  # of a streamed answer
    named_by_header: bool = True  # a client's X-Request-Id is in the answer's id
    # Awaited when all is said, before the client has the end of it.
    before_end: Callable[[], Awaitable[None]] | None = None
    # Awaited once the request is admitted, with its id and its rank: the request that is to be sent.
    before_start: Callable[[ParsedRequest, str, int], Awaitable[ParsedRequest]] | None = None


def form_of_turns(make: Callable[[ParsedRequest], TurnFormat], **options: Any) -> Form:
    """The form of an endpoint whose answers are turns; `options`: its other fields."""

    def whole(head: AnswerHead) -> TurnResponse:
        return TurnResponse(head, None, make(head.parsed_request))

    def stream(head: AnswerHead, write: Callable[[bytes], None], progress: retry.Progress | None) -> TurnResponse:
        return TurnResponse(head, write, make(head.parsed_request))

    return Form(whole, stream, **options)


OPENAI = Form(WholeResponse, StreamResponse)


class Generation:
    """Answers the completions of one frontend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._fingerprint = system_fingerprint(backend.config, backend.version)
        self._drafts_told = drafts_told(backend.config)
        self.unsent = ByteBudget(backend.config.server.max_unsent_bytes)
        self._processors: list[type[Any]] | None = None  # classes; None: not imported yet

    async def answer(self, request: Request, read: ReadRequest, prefix: str, form: Form = OPENAI) -> HttpResponse:
        """The answer of one request. ClientDisconnect when the client leaves before its end."""
        backend, parsed_request = self._backend, read.parsed_request
        if generates(parsed_request.mesh.extras) != (backend.resolved.pooling is None):
            raise HttpError(404, WRONG_RUNNER)
        attaches = read.idempotency_key is not None
        if reason := backend.readiness.refusal(attaches=attaches) or await backend.readiness.wait_serving():
            raise HttpError(503, reason)
        parsed_request = self.permitted(parsed_request, request.scope.get("meshlm.key", ""), read.model)
        if REPLAY in request.headers:
            parsed_request = parsed_request.with_answer(is_recorded=False)
        if names := backend.resolved.logits_processors:
            await self._check_processors(names, parsed_request)
        async with self._with_items(request, parsed_request, attaches=attaches) as parsed_request:
            with backend.requests.budget.open(parsed_request):
                return await self._answered(request, read._replace(parsed_request=parsed_request), prefix, form)

    @contextlib.asynccontextmanager
    async def _with_items(
        self, request: Request, parsed_request: ParsedRequest, *, attaches: bool = False
    ) -> AsyncIterator[ParsedRequest]:
        """The request with the items that the media process made of its images. It holds them to its end; where its client leaves
        and may come again (`attaches`), it runs on, and they are left to its detokenizer."""
        if not parsed_request.mesh.media:
            yield parsed_request
            return
        held = await self._held(request, parsed_request)
        (prompt,) = parsed_request.mesh.prompts
        assert isinstance(prompt, TextPrompt | TokenPrompt | ChatPrompt)
        end = held.release
        try:
            yield parsed_request.with_mesh(prompts=[MediaPrompt(prompt, (Media(held.items),))])
        except (ClientDisconnect, asyncio.CancelledError):
            end = held.leave if attaches else held.release
            raise
        finally:
            end()

    @contextlib.asynccontextmanager
    async def to_count(self, request: Request, prompt: Prompt, media: list[MediaSource]) -> AsyncIterator[Prompt]:
        """A prompt whose tokens are asked for, with the items of its images."""
        parsed_request = ParsedRequest(MeshRequest([prompt], media=media))
        if media:
            key = request.scope.get("meshlm.key", "")
            parsed_request = submits.permitted(parsed_request, key, self._backend.config)
        async with self._with_items(request, parsed_request) as found:
            yield found.mesh.prompts[0]

    async def _held(self, request: Request, parsed_request: ParsedRequest) -> Held:
        """The items of its images, whose bytes are freed."""
        sources = parsed_request.mesh.media
        owner = submits.salt_of(parsed_request.api_key, parsed_request.mesh.cache_salt)
        # An API key's names of images are its own.
        sources[:] = [replace(one, uuid=f"{owner} {one.uuid}") if one.uuid else one for one in sources]
        with self._backend.requests.budget.open(parsed_request), as_http():
            reading = asyncio.ensure_future(self._backend.media.read(sources))
            try:
                held = await unless_disconnected(request, reading)
            except asyncio.CancelledError:
                if reading.done() and not reading.cancelled() and reading.exception() is None:
                    reading.result().release()
                raise
            sources.clear()
        return held

    def permitted(self, parsed_request: ParsedRequest, api_key: str, model: str) -> ParsedRequest:
        """What the server lets this key ask of the model of this name. HttpError."""
        allowed = submits.permitted(parsed_request, api_key, self._backend.config)
        if model in self._backend.resolved.served_names:
            return allowed
        return self._backend.adapters.attached(allowed, model)

    async def _answered(self, request: Request, read: ReadRequest, prefix: str, form: Form) -> HttpResponse:
        parsed_request, model, idempotency_key = read
        backend, options = self._backend, parsed_request.answer
        header = request.headers.get("x-request-id") if form.named_by_header else ""
        name = idempotency_key.key if idempotency_key else header or parsed_request.request_id or uuid.uuid4().hex
        request_id = prefix + name[:128]
        if (transfer := backend.config.kv_transfer.transfer) is not None and transfer.by_request_id:
            try:
                extras = *parsed_request.mesh.extras, *transfer_of_id(name, transfer)
            except ValueError as error:
                raise field_error("X-Request-Id", str(error)) from None
            parsed_request = parsed_request.with_mesh(extras=extras)
        answer_name = request.headers.get("x-request-id") or request_id  # a client's own name comes back as it was
        request.scope.get(NAME, [""])[0] = answer_name  # also of a refusal
        started, created = time.monotonic(), int(time.time())
        end = asyncio.Event()
        writer = EventWriter(dict(request.scope), request.scope["meshlm.send"], self.unsent, form.media_type)
        position = submits.position(parsed_request, idempotency_key) if idempotency_key else None
        head = AnswerHead(parsed_request, request_id, created, model, end.set)
        if options.stream:
            progress = retry.Progress(position) if position else None
            answer: WholeAnswer | StreamedAnswer = form.stream(head, writer.write, progress)
        else:
            answer = form.whole(head)
        answer.trace_headers = trace_headers(request.headers)
        rank = submits.dp_rank(request.headers)
        status = 200
        opened: list[Choice] = []
        asking: asyncio.Future[None] | None = None  # asks for more while the answer is made
        try:
            if form.before_start is not None:
                preparing = form.before_start(parsed_request, request_id, rank)
                parsed_request = answer.parsed_request = await unless_disconnected(request, preparing)
            cuts = position.cuts if position is not None else ()
            asked = await self.submits_of(answer, parsed_request, rank, idempotency_key, cuts)
            if parsed_request.mesh.beams:
                asking = asyncio.ensure_future(self._search(answer, parsed_request, rank, end))
            elif len(asked) > 1:
                asking = asyncio.ensure_future(self._open(asked, opened))
            else:
                opened += answer.choices
                backend.requests.open(*asked[0])
            if options.stream and isinstance(answer, StreamedAnswer):
                return await self._stream(request, answer, writer, end, form, answer_name)
            await unless_disconnected(request, end.wait())
            if parsed_request.mesh.beams and asking is not None:
                await asking
            if answer.error is not None:
                raise answer.error
            if form.before_end is not None:
                await form.before_end()
            assert isinstance(answer, WholeAnswer)
            # A quarter of a second, for as many as there may be.
            long = options.logprobs >= 0 or options.prompt_logprobs >= 0 or len(answer.choices) > MANY_CHOICES
            content = await asyncio.to_thread(answer.body) if long else answer.body()
            headers = dict.fromkeys(form.id_headers, answer_name) | answer.headers
            return HttpResponse(content, media_type=answer.media_type, headers=headers)
        except HttpError as error:
            status = error.status
            raise
        except ClientDisconnect:
            status = 200 if writer.started else 499
            raise
        finally:
            if asking is not None:
                asking.cancel()
            backend.requests.close(opened)
            backend.observer.done(answer, started, request.url.path, status)

    async def _open(self, asked: list[tuple[list[Choice], Submit]], opened: list[Choice]) -> None:
        """Ask for each prompt's choices, which `opened` gets, as those before them begin."""
        pace = Pace(most_waiting(self._backend.config))
        for choices, submit in asked:
            while not pace.room(len(choices)):
                await self._backend.requests.moved()
            opened += choices
            self._backend.requests.open(choices, submit)
            pace.asked(choices)
            await asyncio.sleep(0)  # a large request takes its turn with others' tokens

    async def submits_of(
        self,
        answer: Response,
        parsed_request: ParsedRequest,
        rank: int,
        idempotency_key: retry.IdempotencyKey | None,
        cuts: tuple[int, ...],
    ) -> list[tuple[list[Choice], Submit]]:
        """The Submits of an answer, whose choices are there afterwards. `cuts`: by choice, what the client has."""
        backend = self._backend
        answer.fingerprint = self._fingerprint
        answer.tells_times = backend.config.server.enable_per_request_metrics
        answer.drafts_told = self._drafts_told
        asked: list[tuple[list[Choice], Submit]] = []
        for one in submits.build_each(
            answer, parsed_request, backend.requests.new_handle, rank, idempotency_key, cuts, backend.draws
        ):
            asked.append(one)
            if len(parsed_request.mesh.prompts) > 1:
                await asyncio.sleep(0)  # a large request takes its turn with others' tokens
        if parsed_request.answer.stream and (interval := backend.config.server.stream_interval) > 1:
            spaced = Interval(answer, interval)
            for choice in answer.choices:
                choice.sink = spaced
        return asked

    async def _check_processors(self, names: tuple[str, ...], parsed_request: ParsedRequest) -> None:
        """Asks the logits processors whether they take the request; their classes are imported for the first one."""
        try:
            if self._processors is None:
                self._processors = await asyncio.to_thread(logits_processors.loaded, names)
            with as_http():
                logits_processors.check(self._processors, parsed_request.mesh.sampling)
        except logits_processors.ProcessorError as error:
            raise HttpError.of_kind(ErrorKind.INTERNAL, str(error)) from None

    async def _search(self, answer: Response, parsed_request: ParsedRequest, rank: int, end: asyncio.Event) -> None:
        """Fills in the answer of a beam search, or its error."""
        try:
            await Search(self._backend, parsed_request, answer.request_id, rank).fill(answer)
        except HttpError as error:
            answer.error = error
        finally:
            end.set()

    async def _stream(
        self,
        request: Request,
        answer: StreamedAnswer,
        writer: EventWriter,
        end: asyncio.Event,
        form: Form,
        answer_name: str,
    ) -> HttpResponse:
        """Start with the first news, so that a refusal still has its HTTP status."""
        names = [(name.lower().encode(), answer_name.encode("latin-1", "replace")) for name in form.id_headers]
        pump = asyncio.ensure_future(_first_then_pump(writer, names))
        try:
            await unless_disconnected(request, end.wait())
            if not writer.started and answer.error is not None:
                raise answer.error
            if form.before_end is not None and answer.error is None:
                try:
                    await form.before_end()
                except HttpError as error:  # the stream has begun: it says so
                    answer.error = error
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump
            if not writer.started:
                await writer.start(names)
            if events := answer.last_events():
                writer.write(events)
            await writer.finish()
            return AlreadySent()
        finally:
            pump.cancel()
            writer.release()


async def _first_then_pump(writer: EventWriter, headers: list[tuple[bytes, bytes]]) -> None:
    """Send the headers when the first event waits, then whatever the socket could not take."""
    await writer._wake.wait()
    await writer.start(headers)
    await writer.pump()


async def unless_disconnected(request: Request, work: Awaitable[Prepared]) -> Prepared:
    """What the work gives. ClientDisconnect, and no more of it is done, when the client leaves first."""
    done = asyncio.ensure_future(work)
    left = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({done, left}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        done.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await done  # it ends what it has begun
        raise ClientDisconnect()
    finally:
        done.cancel()
        left.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class AlreadySent(HttpResponse):
    """The response went out through the EventWriter."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Nothing is left to send."""
