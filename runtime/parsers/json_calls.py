"""Calls that are written in JSON: one, a list, several one after the other. Pure; used by the formats of tools/."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from meshlm.runtime.parsers.calls import Call, Tools

BETWEEN = " \t\r\n;"  # what may stand between calls


class _Written(Struct):
    """A call as a model writes it; other keys say nothing that a client is told, such as "type": "function"."""

    name: str
    arguments: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET


def read_call(text: str) -> Call | None:
    """The call that this JSON is: it has a name and arguments, an object or one as text."""
    try:
        found = msgspec.json.decode(text.strip(), type=_Written)
        given = found.parameters if found.arguments is UNSET else found.arguments
        if given is UNSET or not found.name:
            return None
        arguments = bytes(given).decode()
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return call_of(found.name, arguments)


def call_of(name: str, arguments: str, call_id: str = "") -> Call | None:
    """The call of this name, if there is one and the arguments are a JSON object."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return Call(name, arguments, call_id) if name else None


def one(body: str, tools: Tools) -> list[Call]:
    """A body that is one call."""
    call = read_call(body)
    return [call] if call is not None else []


def several(text: str, tools: Tools) -> list[Call]:
    """A text of calls, one after the other and in lists, with blanks or ";" between. None where anything else stands there."""
    calls, decoder, at = list[Call](), json.JSONDecoder(), _skip(text, 0)
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
            value = text[at:end]
            given = [value] if value[0] != "[" else _items(value)
        except (ValueError, msgspec.DecodeError, RecursionError):
            return []
        for written in given:
            call = read_call(written)
            if call is None:
                return []
            calls.append(call)
        at = _skip(text, end)
    return calls


def _items(text: str) -> list[str]:
    return [bytes(item).decode() for item in msgspec.json.decode(text, type=list[Raw])]


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in BETWEEN:
        at += 1
    return at


def fields(pattern: re.Pattern[str], text: str) -> dict[str, str] | None:
    """Names and values where the pattern, again and again, is the whole of the text and no name comes twice; else None."""
    found, at = dict[str, str](), 0
    while match := pattern.match(text, at):
        if match[1].strip() in found:
            return None
        found[match[1].strip()] = match[2]
        at = match.end()
    return None if text[at:].strip() else found


def typed_arguments(written: Mapping[str, str], schema: Mapping[str, Any]) -> str:
    """The arguments of a call that were written without types: each gets what its JSON schema allows, else it is a string."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return msgspec.json.encode({name: typed(text, known.get(name)) for name, text in written.items()}).decode()


def typed(text: str, schema: Any) -> Raw | str | bool | None:
    """One value: the JSON that the text is where the schema takes its type, else the text."""
    kinds, bare = _kinds(schema), text.strip()
    if "null" in kinds and bare.lower() in ("null", "none"):
        return None
    if "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    found = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}.get(type(value), "")
    return Raw(bare.encode()) if found in kinds or (found == "integer" and "number" in kinds) else text


def _kinds(schema: Any) -> set[str]:
    """The types that a schema takes; one without any word of them takes objects and arrays beside strings."""
    if not isinstance(schema, Mapping):
        return set()
    kinds, todo = set[str](), [schema]
    for _ in range(100):  # a client's schema may be without end; what lies below is taken as text
        if not todo:
            break
        now = todo.pop()
        kind = now.get("type")
        kinds.update(name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str))
        kinds.update(_KIND_OF[type(value)] for value in _list(now.get("enum")) if type(value) in _KIND_OF)
        for name in ("anyOf", "oneOf", "allOf"):
            todo += [other for other in _list(now.get(name)) if isinstance(other, Mapping)]
    return kinds or {"object", "array"}


_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def named_parameters(found: re.Match[str] | None, parameter: re.Pattern[str], tools: Tools) -> list[Call]:
    """The call of a body that was found as a name and its parameters, typed by the tool's schema; none where a part does not fit."""
    written = fields(parameter, found[2]) if found else None
    if found is None or written is None:
        return []
    return [Call(found[1], typed_arguments(written, tools.get(found[1], {})))]
