"""What a request for stored things asks for: whose they are, pages of items, and what else a query holds. Pure."""

import hashlib
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request

from meshlm.frontend.http.errors import field_error
from meshlm.frontend.http.operation import Parameter

Json = dict[str, Any]
MAX_LISTED = 100

PAGE = (
    Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "How many."),
    Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "The oldest first, or the newest."),
    Parameter("after", "query", {"type": "string"}, "The id of the item before."),
)  # fmt: skip


def page(found: list[Json], query: QueryParams) -> bytes:
    """The page of these items, given the oldest first, that the query asks for."""
    if query.get("order", "desc") not in ("asc", "desc"):
        raise field_error("order", "'asc' or 'desc'")
    if query.get("order", "desc") == "desc":
        found = found[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(found) if item["id"] == after]
        if not places:
            raise field_error("after", f"there is no item {after[:80]!r}")
        found = found[places[0] + 1 :]
    count = number(query, "limit", 20)
    if not 1 <= count <= MAX_LISTED:
        raise field_error("limit", f"1 to {MAX_LISTED}")
    return listed(found[:count], more=len(found) > count)


def listed(items: list[Json], *, more: bool) -> bytes:
    ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
    return msgspec.json.encode({"object": "list", "data": items, **ends, "has_more": more})


def number(query: QueryParams, name: str, default: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise field_error(name, f"{given[:40]!r} is no number")
    return int(given)


def truth(query: QueryParams, name: str) -> bool:
    given = query.get(name, "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise field_error(name, "must be true or false")
    return given in ("true", "1")


def key_of(request: Request) -> str:
    """The name of the request's API key: what it stores is nobody else's."""
    key = request.scope.get("meshlm.key", "")
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
