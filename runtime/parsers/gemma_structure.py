"""How a strict call is held to its schema in Gemma's forms: `call:NAME{key:value}` with bare keys and marks around texts. Pure.

Parameters come in the order of the schema, and so do the keys of an object within them that says nothing but its properties. A text
is free between its marks, or one of its `enum`; other values are JSON, and so is what the form has no way to hold.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from meshlm.runtime.parsers import grammar_nodes as nodes
from meshlm.runtime.parsers.grammar_nodes import Json
from meshlm.runtime.parsers.structures import PythonStructure, Tools
from meshlm.runtime.schema_reader import SAYS_NOTHING, SchemaReader

MAX_DEPTH = 8  # of objects and lists in the model's own form; deeper ones are JSON
_NAME = re.compile(r"[\w.-]+")
_OF_OBJECT = SAYS_NOTHING | {"type", "properties", "required", "additionalProperties"}
_COMMA: Json = nodes.regex(r"\s{0,2},\s{0,2}")


class GemmaStructure(Struct, frozen=True):
    """`open` and `close` stand around a call, `escape` around a text. `python`: calls may be written in this form, too."""

    open: str
    close: str
    escape: str
    python: PythonStructure | None = None

    def format(self, tools: Tools) -> Json:
        """Free text with such calls in it. ValueError names what of a tool cannot be held."""
        tags = [nodes.tag(self.open, self._call(name, given), self.close) for name, given in tools.items()]
        found: Json = nodes.triggered([self.open], tags)
        if self.python is not None:
            other = self.python.format(tools)
            found = {**found, "triggers": found["triggers"] + other["triggers"], "tags": tags + other["tags"]}
        return found

    def _call(self, name: str, given: Mapping[str, Any] | None) -> Json:
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name of the tool {name!r}")
        head, blanks = nodes.regex(rf"\s{{0,2}}call:{re.escape(name)}"), nodes.regex(r"\s{0,2}")
        if given is None:
            return nodes.sequence(head, nodes.any_of([self._any_object(), nodes.arguments(None)]), blanks)
        try:
            reader = SchemaReader(given)
            found = nodes.sequence(head, self._value(given, reader, 0), blanks)
            reader.check()
        except ValueError as error:
            raise ValueError(f"{error}, of the tool {name!r}") from None
        return found

    def _any_object(self) -> Json:
        """An object of texts and of what JSON writes, as tools that are not strict may have it."""
        value = nodes.any_of([self._text(), nodes.json_schema({})])
        return _between("{}", nodes.sequence(nodes.regex(r"[\w.-]+\s?:\s?"), value))

    def _text(self) -> Json:
        return nodes.tag(self.escape, nodes.ANY_TEXT, self.escape)

    def _value(self, schema: Any, reader: SchemaReader, depth: int) -> Json:
        """A value in the model's own form, or as JSON."""
        found = reader.resolved(schema)
        own = self._own(found, reader, depth) if isinstance(found, Mapping) else None
        return nodes.json_schema(reader.alone(schema)) if own is None else own

    def _own(self, found: Mapping[str, Any], reader: SchemaReader, depth: int) -> Json | None:
        """None for what only JSON can hold."""
        if (values := reader.values(found)) is not None:
            texts = [text for value in values for text in self._spellings(value)]
            return nodes.any_of([nodes.const(text) for text in texts])
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
            return nodes.any_of([self._value(one, reader, depth + 1) for one in found["anyOf"]])
        return None

    def _object(self, schema: Mapping[str, Any], reader: SchemaReader, depth: int) -> Json:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping):
            raise ValueError("properties must be an object")
        if unknown := [name for name in required if name not in properties]:
            raise ValueError(f"required names {unknown[0]!r}, which is no property")
        elements = []
        for key, value in properties.items():
            if not _NAME.fullmatch(key):
                raise ValueError(f"the parameter name {key!r}")
            content = nodes.sequence(nodes.regex(rf"{re.escape(key)}\s?:\s?"), self._value(value, reader, depth + 1))
            elements.append({"content": content, "required": key in required})
        opens, closes = (nodes.regex(pattern) for pattern in (r"\{\s{0,2}", r"\s{0,2}\}"))
        return nodes.sequence(opens, {"type": "joined", "separator": _COMMA, "elements": elements}, closes)

    def _list(self, items: Any, reader: SchemaReader, depth: int) -> Json:
        return _between("[]", self._value(items, reader, depth + 1))

    def _spellings(self, value: Any) -> list[str]:
        """How a value of an enum may be written."""
        if isinstance(value, str) and self.escape in value:
            raise ValueError(f"the value {value!r}")
        mark = self.escape
        return [f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]


def _between(brackets: str, one: Json) -> Json:
    """Any number of these between an opening and a closing bracket."""
    opens, closes = map(nodes.const, brackets)
    return nodes.sequence(opens, nodes.optional(nodes.several(one, _COMMA)), closes)
