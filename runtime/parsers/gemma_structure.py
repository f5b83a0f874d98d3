"""How a strict call is held to its schema in Gemma's forms: `call:NAME{key:value}` with bare keys and marks around texts. Pure.

Parameters come in the order of the schema, and so do the keys of an object within them that says nothing but its properties. A text
is free between its marks, or one of its `enum`; other values are JSON, and so is what the form has no way to hold.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from meshlm.runtime.parsers.list_structures import PythonStructure, Tools
from meshlm.runtime.parsers.parameter_structure import ANY
from meshlm.runtime.schema_reader import SAYS_NOTHING, SchemaReader

Json = dict[str, Any]
MAX_DEPTH = 8  # of objects and lists in the model's own form; deeper ones are JSON
_NAME, _KEY = re.compile(r"[\w.-]+"), re.compile(r"[\w.-]+")
_OF_OBJECT = SAYS_NOTHING | {"type", "properties", "required", "additionalProperties"}
_COMMA: Json = {"type": "regex", "pattern": r"\s{0,2},\s{0,2}"}
_ARGUMENTS: Json = {"type": "json_schema", "json_schema": {"type": "object"}}


class GemmaStructure(Struct, frozen=True):
    """`open` and `close` stand around a call, `escape` around a text. `python`: calls may be written in this form, too."""

    open: str
    close: str
    escape: str
    python: PythonStructure | None = None

    def format(self, tools: Tools) -> Json:
        """Free text with such calls in it. ValueError names what of a tool cannot be held."""
        tags = [
            {"type": "tag", "begin": self.open, "content": self._call(name, given), "end": self.close}
            for name, given in tools.items()
        ]
        found: Json = {"type": "triggered_tags", "triggers": [self.open], "tags": tags}
        if self.python is not None:
            other = self.python.format(tools)
            found = {**found, "triggers": found["triggers"] + other["triggers"], "tags": tags + other["tags"]}
        return found

    def _call(self, name: str, given: Mapping[str, Any] | None) -> Json:
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name of the tool {name!r}")
        head = {"type": "regex", "pattern": rf"\s{{0,2}}call:{re.escape(name)}"}
        blanks = {"type": "regex", "pattern": r"\s{0,2}"}
        if given is None:
            return _sequence(head, {"type": "or", "elements": [self._any_object(), _ARGUMENTS]}, blanks)
        try:
            reader = SchemaReader(given)
            found = _sequence(head, self._value(given, reader, 0), blanks)
            reader.check()
        except ValueError as error:
            raise ValueError(f"{error}, of the tool {name!r}") from None
        return found

    def _any_object(self) -> Json:
        """An object of texts and of what JSON writes, as tools that are not strict may have it."""
        value = {"type": "or", "elements": [self._text(), {"type": "json_schema", "json_schema": {}}]}
        pair = _sequence({"type": "regex", "pattern": r"[\w.-]+\s?:\s?"}, value)
        several = _sequence(pair, {"type": "star", "content": _sequence(_COMMA, pair)})
        braces = [{"type": "const_string", "value": brace} for brace in "{}"]
        return _sequence(braces[0], {"type": "optional", "content": several}, braces[1])

    def _text(self) -> Json:
        return {"type": "tag", "begin": self.escape, "content": ANY, "end": self.escape}

    def _value(self, schema: Any, reader: SchemaReader, depth: int) -> Json:
        """A value in the model's own form, or as JSON."""
        found = reader.resolved(schema)
        own = self._own(found, reader, depth) if isinstance(found, Mapping) else None
        return {"type": "json_schema", "json_schema": reader.alone(schema)} if own is None else own

    def _own(self, found: Mapping[str, Any], reader: SchemaReader, depth: int) -> Json | None:
        """None for what only JSON can hold."""
        if (values := reader.values(found)) is not None:
            texts = [text for value in values for text in self._spellings(value)]
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        said = found.keys() - SAYS_NOTHING
        if found.get("type") == "string":
            return self._text() if said == {"type"} else None
        if depth >= MAX_DEPTH:
            return None
        if found.get("type") == "object" and "properties" in said and said <= _OF_OBJECT:
            return self._object(found, reader, depth)
        if found.get("type") == "array" and said == {"type", "items"}:
            return self._list(found["items"], reader, depth)
        if said == {"anyOf"} and isinstance(found["anyOf"], list):
            return {"type": "or", "elements": [self._value(one, reader, depth + 1) for one in found["anyOf"]]}
        return None

    def _object(self, schema: Mapping[str, Any], reader: SchemaReader, depth: int) -> Json:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping):
            raise ValueError("properties must be an object")
        if unknown := [name for name in required if name not in properties]:
            raise ValueError(f"required names {unknown[0]!r}, which is no property")
        elements = []
        for key, value in properties.items():
            if not _KEY.fullmatch(key):
                raise ValueError(f"the parameter name {key!r}")
            head = {"type": "regex", "pattern": rf"{re.escape(key)}\s?:\s?"}
            elements.append(
                {"content": _sequence(head, self._value(value, reader, depth + 1)), "required": key in required}
            )
        opens, closes = ({"type": "regex", "pattern": pattern} for pattern in (r"\{\s{0,2}", r"\s{0,2}\}"))
        return _sequence(opens, {"type": "joined", "separator": _COMMA, "elements": elements}, closes)

    def _list(self, items: Any, reader: SchemaReader, depth: int) -> Json:
        one = self._value(items, reader, depth + 1)
        several = _sequence(one, {"type": "star", "content": _sequence(_COMMA, one)})
        opens, closes = ({"type": "const_string", "value": bracket} for bracket in "[]")
        return _sequence(opens, {"type": "optional", "content": several}, closes)

    def _spellings(self, value: Any) -> list[str]:
        """How a value of an enum may be written."""
        if isinstance(value, str) and self.escape in value:
            raise ValueError(f"the value {value!r}")
        return (
            [f"{self.escape}{value}{self.escape}"]
            if isinstance(value, str)
            else [json.dumps(value, ensure_ascii=False)]
        )


def _sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": list(elements)}
