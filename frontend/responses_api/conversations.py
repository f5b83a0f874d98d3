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
from meshlm.frontend.http.operation import Group, OfClass, route
from meshlm.frontend.responses_api import items, listing, schema, shelf, translate
from meshlm.frontend.responses_api.listing import key_of
from meshlm.frontend.responses_api.records import CONVERSATION, Conversation
from meshlm.frontend.responses_api.schema import ConversationRequest, ItemsRequest, MetadataRequest

Json = dict[str, Any]
Body = TypeVar("Body", bound=msgspec.Struct)
Read = Callable[[Request, Callable[[Request, bytes], Any]], Awaitable[Any]]
_ALL, _ONE = "/v1/conversations", "/v1/conversations/{conversation_id}"
_ITEMS, _ITEM = f"{_ONE}/items", f"{_ONE}/items/{{item_id}}"
MAX_ADDED = 20  # items in one request: OpenAI's
_route = partial(route, answers=schema.ConversationResponse, errors=(500,))


class ConversationRoutes:
    """All routes of one frontend. `read` reads a request's body within the server's limits."""

    routes = OfClass(Group.TEXT)

    def __init__(self, stored: shelf.Shelf, read: Read, ignored: Callable[[tuple[str, ...], str], None]) -> None:
        self._shelf, self._read, self._ignored = stored, read, ignored

    @_route(_ALL, body=schema.ConversationRequest)
    async def create(self, request: Request) -> HttpResponse:
        """Begin a conversation to which responses add their items."""
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

    @_route(_ONE)
    async def retrieve(self, request: Request) -> HttpResponse:
        """A conversation."""
        return _shown(await self._find(request))

    @_route(_ONE, body=schema.MetadataRequest)
    async def update(self, request: Request) -> HttpResponse:
        """Give a conversation other metadata."""
        body = await self._body(request, MetadataRequest)
        translate.check_metadata(body.metadata)
        found = await self._find(request)
        found = msgspec.structs.replace(found, metadata=msgspec.json.encode(body.metadata or {}))
        await self._shelf.put_conversation(found, [])
        return _shown(found)

    @_route(_ONE, answers=schema.DeletedConversation, methods=("DELETE",))
    async def delete(self, request: Request) -> HttpResponse:
        """Forget a conversation and its items."""
        found = await self._find(request)
        await self._shelf.delete_conversation(found.id)
        return json_response({"id": found.id, "object": "conversation.deleted", "deleted": True})

    @_route(_ITEMS, answers=schema.InputItems, parameters=listing.PAGE)
    async def list_items(self, request: Request) -> HttpResponse:
        """Its items, the newest first."""
        found = await self._find(request)
        content = listing.page(await self._shelf.items(found.id), request.query_params)
        return HttpResponse(content, media_type="application/json")

    @_route(_ITEMS, answers=schema.InputItems, body=schema.ItemsRequest)
    async def add_items(self, request: Request) -> HttpResponse:
        """Add items at its end."""
        body = await self._body(request, ItemsRequest)
        found = await self._find(request)
        added = _checked(body.items, f"{found.id} {uuid.uuid4().hex}")
        await self._shelf.put_conversation(found, added)
        return HttpResponse(listing.listed(added, more=False), media_type="application/json")

    @_route(_ITEM, answers="application/json")
    async def item(self, request: Request) -> HttpResponse:
        """One of its items."""
        found, item_id = await self._find(request), request.path_params["item_id"]
        for item in await self._shelf.items(found.id):
            if item["id"] == item_id:
                return json_response(item)
        raise _no_item(item_id)

    @_route(_ITEM, methods=("DELETE",))
    async def delete_item(self, request: Request) -> HttpResponse:
        """Take an item out of it."""
        found, item_id = await self._find(request), request.path_params["item_id"]
        if not await self._shelf.delete_item(found.id, item_id):
            raise _no_item(item_id)
        return _shown(found)

    async def _find(self, request: Request) -> Conversation:
        name = "conversation_id"
        return await self._shelf.conversation(request.path_params[name], key_of(request), name)

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
