"""Arguments that are written without types: each gets what its JSON schema allows, else it is a string. Pure."""

from collections.abc import Mapping, Set
from typing import Any

import msgspec

_FIRST = {
    "object": "{",
    "array": "[",
    "integer": "-0123456789",
    "number": "-0123456789",
    "boolean": "tTfF",
    "null": "nN",
}


def kinds(schema: Any) -> set[str]:
    """The types that a schema takes; one without any word of them takes objects and arrays beside strings."""
    if not isinstance(schema, Mapping):
        return set()
    found, todo = set[str](), [schema]
    for _ in range(100):  # a client's schema may be without end; what lies below is taken as text
        if not todo:
            break
        now = todo.pop()
        kind = now.get("type")
        found.update(name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str))
        found.update(_KIND_OF[type(value)] for value in _list(now.get("enum")) if type(value) in _KIND_OF)
        for name in ("anyOf", "oneOf", "allOf"):
            todo += [other for other in _list(now.get(name)) if isinstance(other, Mapping)]
    return found or {"object", "array"}


def schema_of(tool: Mapping[str, Any] | None, name: str) -> Any:
    """The schema of one parameter of a tool; None where nothing is said of it."""
    properties = (tool or {}).get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def is_text(first: str, allowed: Set[str]) -> bool:
    """Whether a value that begins with this character can only be a string."""
    return not any(first in _FIRST.get(kind, "") for kind in allowed)


def typed(text: str, allowed: Set[str]) -> str:
    """One value as JSON: what the text is where its type is allowed, else the text as a string."""
    bare = text.strip()
    if "null" in allowed and bare.lower() in ("null", "none"):
        return "null"
    if "boolean" in allowed and bare.lower() in ("true", "false"):
        return bare.lower()
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return quoted(text)
    kind = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}.get(type(value), "")
    return bare if kind in allowed or (kind == "integer" and "number" in allowed) else quoted(text)


def quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def escaped(text: str) -> str:
    """A part of a JSON string that means this text."""
    return msgspec.json.encode(text).decode()[1:-1]


_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []
