"""How a strict call is held to its schema in the forms whose parameters stand each between tags. Pure; see `Structure` in calls.py.

The parameters come in the order of the schema. A value that is no text is JSON by its own schema; a text is free up to the closing
tag, or one of the texts of its `enum`. What else the schema asks of a text cannot be held in these forms and is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from meshlm.runtime.parsers import grammar_nodes as nodes
from meshlm.runtime.parsers import typed_values
from meshlm.runtime.parsers.grammar_nodes import Json
from meshlm.runtime.schema_reader import MAX_DEPTH, SAYS_NOTHING, SchemaReader

_BLANKS: Json = nodes.regex(r"\s{0,3}")
_OF_TEXT = SAYS_NOTHING | {"type", "anyOf", "oneOf", "nullable"}  # what may be said of free text
_OF_THE_WHOLE = (
    "patternProperties", "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "not", "if", "$ref",
)  # fmt: skip


def properties_of(reader: SchemaReader) -> tuple[dict[str, Any], list[str]]:
    """The schemas of a tool's parameters, and the names of those that must be there. ValueError: what cannot be held of them all."""
    given = reader.resolved(reader.root)
    properties, required = given.get("properties") or {}, given.get("required") or []
    if not isinstance(properties, dict):
        raise ValueError("properties must be an object")
    for keyword in _OF_THE_WHOLE:
        if keyword in given:
            raise ValueError(f"{keyword} of the parameters as a whole")
    if unknown := [name for name in required if name not in properties]:
        raise ValueError(f"required names {unknown[0]!r}, which is no property")
    return properties, required


class ParameterStructure(Struct, frozen=True):
    """KEY is the name of a parameter, NAME the tool's. `parameter_of_text`: opens one that is a string, where that differs."""

    trigger: str
    begin: str
    end: str
    parameter: str
    parameter_close: str
    parameter_of_text: str = ""

    def content(self, given: Mapping[str, Any] | None) -> Json:
        """What stands between begin and end, as a format of a structural tag; any text for a tool that is not strict. ValueError names
        what of a schema cannot be held."""
        if given is None:
            return nodes.ANY_TEXT
        reader = SchemaReader(given)
        (properties, required), elements = properties_of(reader), [_BLANKS]
        for key, schema in properties.items():
            if any(mark in key for mark in "<>\"'\n"):
                raise ValueError(f"the parameter name {key!r}")
            both = nodes.sequence(self._parameter(key, schema, reader), _BLANKS)
            elements.append(both if key in required else nodes.optional(both))
        reader.check()
        return nodes.sequence(*elements)

    def _parameter(self, key: str, schema: Any, reader: SchemaReader) -> Json:
        kinds, branches = reader.kinds(schema), reader.branches(schema)
        reader.check()
        listed = [reader.values(branch) for branch in branches]
        others = [branch for branch, values in zip(branches, listed, strict=True) if values is None]
        if any("string" in reader.kinds(branch) for branch in others):
            for branch in branches:
                _check_text(key, branch, reader)
            return nodes.tag(self._opens_text(key), nodes.ANY_TEXT, self.parameter_close)
        if others and "string" not in kinds:
            return self._json(key, reader.alone(schema))
        ways = [self._value(key, value, kinds) for values in listed for value in values or ()]
        ways += [self._json(key, reader.alone(branch)) for branch in others]
        if not ways:
            raise ValueError(f"the parameter {key!r}, which no value fits,")
        return nodes.any_of(ways)

    def _json(self, key: str, schema: Any) -> Json:
        """A value that is written as JSON."""
        opens = nodes.const(self.parameter.replace("KEY", key))
        closes = nodes.const(self.parameter_close)
        return nodes.sequence(opens, nodes.json_schema(schema), closes)

    def _opens_text(self, key: str) -> str:
        return (self.parameter_of_text or self.parameter).replace("KEY", key)

    def _value(self, key: str, value: Any, kinds: set[str]) -> Json:
        """One value of an enum, which the parser reads as this one."""
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        read = typed_values.quoted(text) if is_text and self.parameter_of_text else typed_values.typed(text, kinds)
        if json.loads(read) != value or "<" in text or text != text.strip():
            raise ValueError(f"the value {value!r} of the parameter {key!r}")
        opens = self._opens_text(key) if is_text else self.parameter.replace("KEY", key)
        return nodes.const(f"{opens}{text}{self.parameter_close}")


def _check_text(key: str, schema: Any, reader: SchemaReader, depth: int = 0) -> None:
    """ValueError for keywords that would have to be held within a text."""
    schema = reader.resolved(schema)
    if not isinstance(schema, Mapping):
        return
    if (wrong := sorted(schema.keys() - _OF_TEXT)) or depth > MAX_DEPTH:
        raise ValueError(f"{(wrong or ['a union'])[0]} of the parameter {key!r}, which may be text")
    for name in ("anyOf", "oneOf"):
        for branch in schema.get(name) or ():
            _check_text(key, branch, reader, depth + 1)
