"""How a strict call is held to its schema in the forms whose parameters stand each between tags. Pure; see `Structure` in calls.py.

The parameters come in the order of the schema. A value that is no text is JSON by its own schema; a text is free up to the closing
tag, or one of the texts of its `enum`. What else the schema asks of a text cannot be held in these forms and is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from meshlm.runtime.parsers import typed_values

Json = dict[str, Any]
ANY: Json = {"type": "any_text"}
_BLANKS: Json = {"type": "regex", "pattern": r"\s{0,3}"}
_SAYS_NOTHING = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "anyOf", "oneOf", "$comment"}
)


_OF_THE_WHOLE = (
    "patternProperties", "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "not", "if", "$ref",
)  # fmt: skip


def properties_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schemas of a tool's parameters, and the names of those that must be there. ValueError: what cannot be held of them all."""
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
            return ANY
        (properties, required), elements = properties_of(given), [_BLANKS]
        for key, schema in properties.items():
            if any(mark in key for mark in "<>\"'\n"):
                raise ValueError(f"the parameter name {key!r}")
            both = {"type": "sequence", "elements": [self._parameter(key, schema, given), _BLANKS]}
            elements.append(both if key in required else {"type": "optional", "content": both})
        return {"type": "sequence", "elements": elements}

    def _parameter(self, key: str, schema: Any, root: Mapping[str, Any]) -> Json:
        found = resolved(schema, root)
        kinds = typed_values.kinds(found)
        if isinstance(found, Mapping) and ("enum" in found or "const" in found):
            values = found["enum"] if "enum" in found else [found["const"]]
            return {"type": "or", "elements": [self._value(key, value, kinds) for value in values]}
        if "string" not in kinds:
            own = {name: root[name] for name in ("$defs", "definitions") if name in root}
            held = {"type": "json_schema", "json_schema": {**own, **schema} if isinstance(schema, Mapping) else schema}
            opens = {"type": "const_string", "value": self.parameter.replace("KEY", key)}
            closes = {"type": "const_string", "value": self.parameter_close}
            return {"type": "sequence", "elements": [opens, held, closes]}
        _check_text(key, found)
        return {"type": "tag", "begin": self._opens_text(key), "content": ANY, "end": self.parameter_close}

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
        return {"type": "const_string", "value": f"{opens}{text}{self.parameter_close}"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference to a definition stands for."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        _, _, path = reference.partition("#/")
        group, _, name = path.partition("/")
        target = (root.get(group) or {}).get(name.replace("~1", "/").replace("~0", "~")) if path else None
        if target is None:
            return schema
        schema = target
    return schema


def _check_text(key: str, schema: Any) -> None:
    """ValueError for keywords that would have to be held within a text."""
    if not isinstance(schema, Mapping):
        return
    if wrong := sorted(schema.keys() - _SAYS_NOTHING):
        raise ValueError(f"{wrong[0]} of the parameter {key!r}, which may be text")
    for name in ("anyOf", "oneOf"):
        for branch in schema.get(name) or ():
            _check_text(key, branch)
