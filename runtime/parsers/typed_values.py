"""Arguments that are written without types: each gets what its JSON schema allows, else it is a string. Pure.

Which types a schema allows, runtime/schema_reader.py reads.
"""

from collections.abc import Set

import msgspec

_FIRST = {
    "object": "{",
    "array": "[",
    "integer": "-0123456789",
    "number": "-0123456789",
    "boolean": "tTfF",
    "null": "nN",
}


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
