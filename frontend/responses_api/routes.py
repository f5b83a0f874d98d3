"""The routes of /v1/responses: a body to a chat's request, and from there on the path of every chat; and what is stored of it.

What counts and compacts conversations is input_routes.py's.
"""

import asyncio
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.http.operation import NAMED, Group, OfClass, Parameter, route, switch
from meshlm.frontend.http.retry import LAST_ID, IdempotencyKey, refuse_last_id
from meshlm.frontend.http.server import EventWriter
from meshlm.frontend.openai import limits
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.openai.turn import TurnResponse
from meshlm.frontend.requests.generation import (
    AlreadySent,
    Backend,
    Generation,
    ReadRequest,
    disconnected,
    form_of_turns,
)
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.frontend.responses_api import background, conversations, items, listing, schema, shelf, translate
from meshlm.frontend.responses_api.background import Background, Running
from meshlm.frontend.responses_api.format import ResponseFormat
from meshlm.frontend.responses_api.history import History
from meshlm.frontend.responses_api.listing import key_of
from meshlm.frontend.responses_api.records import CONVERSATION, Chunk, Stored
from meshlm.frontend.responses_api.schema import ResponsesRequest
from meshlm.protocol.config.server import STORE_OFF

Json = dict[str, Any]
_ALL, _ONE = "/v1/responses", "/v1/responses/{response_id}"
_AFTER_TEXT = "With stream: the number of the event before."
_EVENTS = (
    switch("stream", "Its events, also those that are still to come."),
    Parameter("starting_after", "query", {"type": "integer", "minimum": 0}, _AFTER_TEXT),
)
POLL_S = 0.2  # how often a stream looks for events that another frontend writes
MAX_FOLLOWED = 1024  # streams of events that one frontend reads from the store
_route = partial(route, answers=schema.ResponsesResponse, errors=(500,))


class Body(NamedTuple):
    """A request of POST /v1/responses, read."""

    fields: ResponsesRequest
    unknown: tuple[str, ...]
    raw: bytes
    model: str


class ResponseRoutes:
    """All routes of one frontend."""

    routes = OfClass(Group.GENERATION)

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        server, run = backend.config.server, backend.config.run
        path: Path | None = Path(server.responses_store or Path(run.run_dir) / shelf.FILE)
        self._shelf = shelf.Shelf(
            None if server.responses_store == STORE_OFF else path,
            server.responses_store_count,
            server.responses_store_bytes,
        )
        self._backend, self._generation, self._reader = backend, generation, reader
        self.conversations = conversations.ConversationRoutes(self._shelf, reader.read, backend.observer.ignored)
        self.history = History(self._shelf, backend.resolved.max_model_len)
        self._num_followed = 0
        self._background = Background(backend, generation, self._shelf, self._asked_again)

    def start(self) -> None:
        if self._shelf.path is not None:
            self._background.start()

    async def stop(self) -> None:
        await self._background.stop()
        self._shelf.close()

    # --- create ---

    @route(_ALL, "", schema.ResponsesResponse, schema.ResponsesRequest, parameters=NAMED, streams=True)
    async def create(self, request: Request) -> HttpResponse:
        """Answer a conversation, by OpenAI's newer API."""
        body, idempotency_key = await self._reader.read(request, self._read)
        fields, key = body.fields, key_of(request)
        stores = self._stores(fields)
        fields, before = await self.history.complete(fields, key)
        body = body._replace(fields=fields)
        parsed_request = await self._parsed(fields, body.unknown, before, len(body.raw))
        name = idempotency_key.key if idempotency_key else parsed_request.request_id or uuid.uuid4().hex
        if stores and "/" in name:
            raise field_error("request_id", "a response that is stored is found by it in a path, so it has no '/'")
        if fields.background:
            return await self._begin(request, body, parsed_request, f"resp_{name}", key)
        turn = ResponseFormat(fields, parsed_request, stores=stores, streams=parsed_request.answer.stream)
        before_end = partial(self._keep, turn, fields, key) if stores else None
        form = form_of_turns(lambda _: turn, named_by_header=False, before_end=before_end)
        read = ReadRequest(parsed_request, body.model, idempotency_key)
        return await self._generation.answer(request, read, "resp_", form)

    def _read(self, request: Request, raw: bytes) -> tuple[Body, IdempotencyKey | None]:
        resolved = self._backend.resolved
        check = partial(limits.check_raw_texts, resolved=resolved, vectors=resolved.spec.media is not None)
        fields, unknown = bodies.decode(raw, ResponsesRequest, check, self._reader.longest)
        translate.check(fields)
        refuse_last_id(request.headers.get(LAST_ID, ""))
        model = self._reader.check_model(fields.model)
        return Body(fields, unknown, raw, model), self._reader.idempotency_key(request, raw)

    def _stores(self, fields: ResponsesRequest) -> bool:
        is_on = self._shelf.path is not None
        if translate.conversation_of(fields) and fields.store is False:
            raise field_error("store", "a conversation keeps its responses")
        for field in ("store", "background"):
            if not is_on and getattr(fields, field):
                raise field_error(field, "this server stores no responses (--responses-store)")
        return is_on and fields.store is not False

    async def _parsed(
        self, fields: ResponsesRequest, unknown: tuple[str, ...], before: list[Json], size: int
    ) -> ParsedRequest:
        if size > bodies.LARGE_BYTES:
            return await asyncio.to_thread(translate.asked, fields, unknown, before, self._backend)
        return translate.asked(fields, unknown, before, self._backend)

    async def _keep(self, turn: ResponseFormat, fields: ResponsesRequest, key: str) -> None:
        """Stores an answer, before its client has the end of it. Where the store fails it is answered all the same, and says `store`
        false."""
        status, answer = turn.outcome()
        new = self._stored(turn.final["id"], key, fields, status, turn.final["created_at"], answer)
        try:
            is_kept = await self._shelf.put(new)
        except HttpError as error:
            if error.status < 500 or new.previous.startswith(CONVERSATION):  # which would lack this turn
                raise
            turn.is_not_stored()
            return
        if not is_kept:
            raise field_error("request_id", f"there is another response {new.id!r}")

    @staticmethod
    def _stored(
        response_id: str, key: str, fields: ResponsesRequest, status: str, created: int, answer: bytes
    ) -> Stored:
        earlier = items.previous_items(fields.previous_input_messages)
        return Stored(
            id=response_id,
            key=key,
            status=status,
            background=bool(fields.background),
            created=created,
            previous=translate.conversation_of(fields) or fields.previous_response_id or "",
            answer=answer,
            items=msgspec.json.encode(items.stored([*earlier, *items.listed(fields.input or [])], response_id)),
        )

    # --- in the background ---

    async def _begin(
        self, request: Request, body: Body, parsed_request: ParsedRequest, response_id: str, key: str
    ) -> HttpResponse:
        """Stores the request and has it computed; the answer does not wait for it."""
        if reason := self._backend.readiness.refusal(attaches=False) or await self._backend.readiness.wait_serving():
            raise HttpError(503, reason)
        parsed_request = self._generation.permitted(parsed_request, request.scope.get("meshlm.key", ""), body.model)
        fields, created = body.fields, int(time.time())
        format_ = ResponseFormat(fields, parsed_request, stores=True, streams=True)
        blank = TurnResponse(AnswerHead(parsed_request, response_id, created, body.model, lambda: None), None, format_)
        format_.queued(blank)
        chunk = Chunk(0, 1, b"".join(format_.events))
        format_.events.clear()
        answer = msgspec.json.encode(format_.snapshot(blank, "queued"))
        new = msgspec.structs.replace(
            self._stored(response_id, key, fields, "queued", created, answer),
            request=body.raw,
            salt=parsed_request.mesh.cache_salt,
            holder=self._shelf.holder,
            lease=time.time() + background.LEASE_S,
            next_event=1,
        )
        if not await self._shelf.put(new, chunk):
            raise field_error("request_id", f"there is another response {response_id!r}")
        self._background.begin(new, (parsed_request, format_, body.model), request.headers)
        self._backend.observer.ignored(body.unknown, request.url.path)
        if fields.stream:
            return await self._follow(request, response_id, -1)
        return HttpResponse(answer, media_type="application/json", headers=names_of(request, response_id))

    async def _asked_again(self, stored: Stored) -> tuple[ParsedRequest, ResponseFormat, str]:
        """The request of a response that another frontend began."""
        fields, unknown = bodies.decode(stored.request, ResponsesRequest, lambda _: None, 1 << 62)
        fields, before = await self.history.complete(fields, stored.key)
        parsed_request = await self._parsed(fields, unknown, before, len(stored.request))
        model = msgspec.json.decode(stored.answer)["model"]
        if model not in self._backend.adapters.names:
            raise HttpError(404, f"The model `{model}` is not served any more", "model")
        parsed_request = self._backend.adapters.attached(parsed_request, model)
        form = ResponseFormat(fields, parsed_request, stores=True, streams=True)
        is_recorded = bool(self._backend.config.server.record_requests)
        return parsed_request.with_mesh(cache_salt=stored.salt).with_answer(is_recorded=is_recorded), form, model

    # --- what is stored ---

    @_route(_ONE, parameters=_EVENTS, streams=True)
    async def retrieve(self, request: Request) -> HttpResponse:
        """A response that is stored; of one in the background also its events."""
        stored = await self._shelf.find(request.path_params["response_id"], key_of(request))
        after = listing.number(request.query_params, "starting_after", -1)
        if not listing.truth(request.query_params, "stream"):
            if after >= 0:
                raise HttpError(400, "starting_after needs stream=true", "starting_after")
            return _json(self._now(stored))
        if not stored.background:
            raise field_error("stream", "only a response in the background can be streamed once more")
        return await self._follow(request, stored.id, after)

    def _now(self, stored: Stored) -> bytes:
        """The response as it is: of one that is computed here, with what there is of it."""
        running: Running | None = self._background.partial(stored.id)
        if running is not None and running.form.num_events > 1:
            return msgspec.json.encode(running.form.snapshot(running, "in_progress"))
        if stored.lease is None:
            return stored.answer
        return msgspec.json.encode({**msgspec.json.decode(stored.answer), "status": stored.status})

    @_route(_ONE, answers=schema.DeletedResponse, methods=("DELETE",))
    async def delete(self, request: Request) -> HttpResponse:
        """Forget a response."""
        response_id = request.path_params["response_id"]
        await self._shelf.delete(response_id, key_of(request))
        self._background.lose(response_id)
        return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    @_route(f"{_ONE}/cancel", methods=("POST",))
    async def cancel(self, request: Request) -> HttpResponse:
        """End a response in the background."""
        key = key_of(request)
        stored = await self._shelf.find(request.path_params["response_id"], key)
        if not stored.background:
            raise field_error("response_id", "only a response in the background can be cancelled")
        if stored.lease is not None:
            answer = msgspec.json.encode({**msgspec.json.decode(self._now(stored)), "status": "cancelled"})
            if await self._shelf.cancel(stored.id, key, answer):
                self._background.lose(stored.id)
                return _json(answer)
            stored = await self._shelf.find(stored.id, key)  # it ended meanwhile
        if stored.status != "cancelled":
            raise field_error("response_id", f"this response is {stored.status} already")
        return _json(stored.answer)

    @_route(f"{_ONE}/input_items", answers=schema.InputItems, parameters=listing.PAGE)
    async def input_items(self, request: Request) -> HttpResponse:
        """The input of a response, the newest item first."""
        stored = await self._shelf.find(request.path_params["response_id"], key_of(request))
        return _json(listing.page(msgspec.json.decode(stored.items), request.query_params))

    async def _follow(self, request: Request, response_id: str, after: int) -> HttpResponse:
        """The events behind number `after`, as they are written; whoever computes the response."""
        if self._num_followed >= MAX_FOLLOWED:
            raise HttpError(503, f"{MAX_FOLLOWED} streams of stored responses are read already")
        self._num_followed += 1
        writer = EventWriter(dict(request.scope), request.scope["meshlm.send"], self._generation.unsent)
        left = asyncio.ensure_future(disconnected(request))
        headers = names_of(request, response_id).items()
        try:
            await writer.start([(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers])
            while not left.done():
                status, chunks = await self._shelf.events(response_id, after)
                for chunk in chunks:
                    writer.write(chunk.data)
                    after = chunk.first + chunk.count - 1
                await writer.drain()
                if chunks:
                    continue
                if status not in ("queued", "in_progress"):
                    await writer.finish()
                    return AlreadySent()
                is_here = self._background.partial(response_id) is not None
                limit_s = 10 * POLL_S if is_here else POLL_S  # what this frontend writes, it hears of
                news = asyncio.ensure_future(self._shelf.news(limit_s))
                await asyncio.wait({left, news}, return_when="FIRST_COMPLETED")
            raise ClientDisconnect()
        finally:
            self._num_followed -= 1
            left.cancel()
            writer.release()


def names_of(request: Request, response_id: str) -> dict[str, str]:
    return {"X-Request-Id": request.headers.get("x-request-id") or response_id}


def _json(content: bytes) -> HttpResponse:
    return HttpResponse(content, media_type="application/json")
