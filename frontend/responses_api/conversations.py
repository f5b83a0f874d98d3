"""The routes of /v1/conversations. Their items are stored as they are sent, and read when a response goes on with them."""

import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.http.operation import STORED, Group, OfClass, Parameter, route
from meshlm.frontend.responses_api import items, listing, schema, shelf, translate
from meshlm.frontend.responses_api.listing import key_of
from meshlm.frontend.responses_api.records import CONVERSATION, Conversation
from meshlm.frontend.responses_api.schema import ConversationRequest, ItemsRequest, MetadataRequest

Json = dict[str, Any]
Body = TypeVar("Body", bound=msgspec.Struct)
Read = Callable[[Request, Callable[[Request, bytes], Any]], Awaitable[Any]]
_CONVERSATION = Parameter("conversation_id", "path", {"type": "string", "minLength": 1}, "The id of a conversation.")
_ITEM = Parameter("item_id", "path", {"type": "string", "minLength": 1}, "The id of an item.")
MAX_ADDED = 20  # items in one request: OpenAI's
_conversation = partial(route, errors=STORED, parameters=(_CONVERSATION,))


class ConversationRoutes:
    """All routes of one frontend. `read` reads a request's body within the server's limits."""

    routes = OfClass(Group.TEXT)

    def __init__(self, stored: shelf.Shelf, read: Read, ignored: Callable[[tuple[str, ...], str], None]) -> None:
        self._shelf, self._read, self._ignored = stored, read, ignored

    @route(
        "/v1/conversations",
        "Begin a conversation to which responses add their items.",
        answers=schema.ConversationResponse,
        body=schema.ConversationRequest,
        errors=(*STORED, 413),
    )
    async def create(self, request: Request) -> HttpResponse:
        body = await self._body(request, ConversationRequest)
        if self._shelf.path is None:
            raise HttpError(400, "this server stores no conversations (--responses-store)")
        translate.check_metadata(body.metadata)
        name = f"{CONVERSATION}{uuid.uuid4().hex}"
        added = _checked(body.items or [], name)
        metadata = msgspec.json.encode(body.metadata or {})
        new = Conversation(name, key_of(request), int(time.time()), metadata)
        await self._shelf.put_conversation(new, added)
        return _shown(new)

    @_conversation("/v1/conversations/{conversation_id}", "A conversation.", answers=schema.ConversationResponse)
    async def retrieve(self, request: Request) -> HttpResponse:
        return _shown(await self._find(request))

    @route(
        "/v1/conversations/{conversation_id}",
        "Give a conversation other metadata.",
        answers=schema.ConversationResponse,
        body=schema.MetadataRequest,
        errors=(*STORED, 413),
        parameters=(_CONVERSATION,),
    )
    async def update(self, request: Request) -> HttpResponse:
        body = await self._body(request, MetadataRequest)
        translate.check_metadata(body.metadata)
        found = await self._find(request)
        found = msgspec.structs.replace(found, metadata=msgspec.json.encode(body.metadata or {}))
        await self._shelf.put_conversation(found, [])
        return _shown(found)

    @_conversation(
        "/v1/conversations/{conversation_id}",
        "Forget a conversation and its items.",
        answers=schema.DeletedConversation,
        methods=("DELETE",),
    )
    async def delete(self, request: Request) -> HttpResponse:
        found = await self._find(request)
        await self._shelf.delete_conversation(found.id)
        return json_response({"id": found.id, "object": "conversation.deleted", "deleted": True})

    @route(
        "/v1/conversations/{conversation_id}/items",
        "Its items, the newest first.",
        answers=schema.InputItems,
        errors=STORED,
        parameters=(_CONVERSATION, *listing.PAGE),
    )
    async def list_items(self, request: Request) -> HttpResponse:
        found = await self._find(request)
        content = listing.page(await self._shelf.items(found.id), request.query_params)
        return HttpResponse(content, media_type="application/json")

    @route(
        "/v1/conversations/{conversation_id}/items",
        "Add items at its end.",
        answers=schema.InputItems,
        body=schema.ItemsRequest,
        errors=(*STORED, 413),
        parameters=(_CONVERSATION,),
    )
    async def add_items(self, request: Request) -> HttpResponse:
        body = await self._body(request, ItemsRequest)
        found = await self._find(request)
        added = _checked(body.items, f"{found.id} {uuid.uuid4().hex}")
        await self._shelf.put_conversation(found, added)
        return HttpResponse(listing.listed(added, more=False), media_type="application/json")

    @route(
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "One of its items.",
        answers="application/json",
        errors=STORED,
        parameters=(_CONVERSATION, _ITEM),
    )
    async def item(self, request: Request) -> HttpResponse:
        found, item_id = await self._find(request), request.path_params["item_id"]
        for item in await self._shelf.items(found.id):
            if item["id"] == item_id:
                return json_response(item)
        raise _no_item(item_id)

    @route(
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "Take an item out of it.",
        answers=schema.ConversationResponse,
        methods=("DELETE",),
        errors=STORED,
        parameters=(_CONVERSATION, _ITEM),
    )
    async def delete_item(self, request: Request) -> HttpResponse:
        found, item_id = await self._find(request), request.path_params["item_id"]
        if not await self._shelf.delete_item(found.id, item_id):
            raise _no_item(item_id)
        return _shown(found)

    async def _find(self, request: Request) -> Conversation:
        return await self._shelf.conversation(
            request.path_params["conversation_id"], key_of(request), "conversation_id"
        )

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        def read(_: Request, raw: bytes) -> tuple[Body, tuple[str, ...]]:
            return bodies.decode(raw or b"{}", kind)

        body, unknown = await self._read(request, read)
        self._ignored(unknown, request.url.path)
        found: Body = body
        return found


def _checked(given: list[Json], name: str) -> list[Json]:
    """The items as they are stored. HttpError for those that no prompt could have."""
    if len(given) > MAX_ADDED:
        raise field_error("items", f"{len(given)} items; at most {MAX_ADDED} in one request")
    items.messages_of(given, "items")
    return items.stored(given, name)


def _no_item(item_id: str) -> HttpError:
    return HttpError(404, f"item_id: there is no item {item_id[:80]!r}", "item_id")


def _shown(found: Conversation) -> HttpResponse:
    metadata = msgspec.json.decode(found.metadata)
    return json_response({"id": found.id, "object": "conversation", "created_at": found.created, "metadata": metadata})
