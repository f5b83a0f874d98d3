"""The nodes of structural tags: how a grammar says what a call may be. Pure; detokenizer/structural_tags.py reads them."""

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]
ANY_TEXT: Json = {"type": "any_text"}


def sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": list(elements)}


def any_of(elements: Iterable[Json]) -> Json:
    return {"type": "or", "elements": list(elements)}


def regex(pattern: str) -> Json:
    return {"type": "regex", "pattern": pattern}


def const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def optional(content: Json) -> Json:
    return {"type": "optional", "content": content}


def star(content: Json) -> Json:
    return {"type": "star", "content": content}


def several(one: Json, between: Json) -> Json:
    """One or more."""
    return sequence(one, star(sequence(between, one)))


def tag(begin: str, content: Json, end: str = "") -> Json:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: Iterable[str], tags: Iterable[Json], **more: Any) -> Json:
    """Free text, in which each trigger begins one of the tags."""
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **more}


def json_schema(schema: Any) -> Json:
    return {"type": "json_schema", "json_schema": schema}


def arguments(given: Mapping[str, Any] | None) -> Json:
    """A call's arguments by the schema of its tool; None: any."""
    return json_schema({"type": "object"} if given is None else given)
