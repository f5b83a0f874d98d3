"""What a JSON schema says of a value: the types that it takes, and the schema of a property, through references and combinations. Pure.

A schema has this one reader: parsers give an argument the type that it says (parsers/parameter_calls.py), and the makers of grammars
hold the model to the same (parsers/structures.py and gemma_structure.py). References are pointers from the root
(schema_references.with_pointers). Circles and long chains end: what lies beyond the limits says nothing.
"""

import re
from collections.abc import Mapping
from typing import Any

from meshlm.runtime.schema_references import TooLarge, extracted, target

MAX_DEPTH = 32  # of combinations within combinations; references that are nothing else do not count
MAX_SCHEMAS = 1000  # that one question looks at ...
MAX_STEPS = 100_000  # ... and all questions about one document
MAX_COPIED = 50_000  # schemas that are made documents of their own
MAX_PATTERNS, MAX_PATTERN, MAX_NAME, MAX_REPEATS = 100, 256, 128, 2  # of patternProperties: what they may cost
SAYS_NOTHING = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions"}
)
_COMBINED = ("anyOf", "oneOf")
_CONDITIONAL = ("then", "else")
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object",
            list: "array"}  # fmt: skip


class SchemaReader:
    """Reads one document, a tool's parameters say."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._left = 0  # schemas that this question may still look at
        self._steps_left, self._copies_left = MAX_STEPS, MAX_COPIED
        self.is_exhausted = False  # something was not looked at

    def check(self) -> None:
        """ValueError where an answer may be wrong, as something was not looked at: a constraint must not be made of it."""
        if self.is_exhausted:
            raise ValueError("a schema with more references and unions than are read")

    def _begin(self) -> None:
        """A question."""
        self._left = MAX_SCHEMAS

    def _step(self) -> bool:
        """Whether one more schema may be looked at."""
        self._left -= 1
        self._steps_left -= 1
        if self._left < 0 or self._steps_left < 0:
            self.is_exhausted = True
            return False
        return True

    def _copy(self) -> None:
        self._copies_left -= 1
        if self._copies_left < 0:
            raise TooLarge("a schema whose references are to be copied too often")

    def resolved(self, schema: Any) -> Any:
        """The schema that a reference, or an allOf of one, stands for, with what is said beside it; itself where it is neither."""
        self._begin()
        return self._resolved(schema)

    def _resolved(self, schema: Any) -> Any:
        said: dict[str, Any] = {}
        while isinstance(schema, Mapping):
            found, keyword = target(self.root, schema.get("$ref")), "$ref"
            if found is None and len(only := _list(schema.get("allOf"))) == 1:
                found, keyword = only[0], "allOf"
            if not isinstance(found, Mapping):
                break
            if not self._step():
                break
            for name, value in schema.items():
                if name != keyword:
                    said.setdefault(name, value)
            schema = found
        if not said or not isinstance(schema, Mapping):
            return schema
        differ = any(schema[name] != said[name] for name in (schema.keys() & said.keys()) - SAYS_NOTHING)
        return {"allOf": [schema, said]} if differ else {**schema, **said}

    def kinds(self, schema: Any) -> set[str]:
        """The types that a schema takes; one without any word of them takes objects and arrays beside strings."""
        self._begin()
        found = self._kinds(schema, frozenset())
        return set(found) if found else {"object", "array"}

    def kinds_of(self, name: str) -> set[str]:
        """The types that a property of the document's objects takes."""
        self._begin()
        return self.kinds(self._property(self.root, name, frozenset(), declared=False))

    def declares(self, name: str) -> bool:
        """Whether the document names this property."""
        self._begin()
        return self._property(self.root, name, frozenset(), declared=True) is not None

    def branches(self, schema: Any) -> list[Any]:
        """The schemas of which a value fits one, where the schema says no more than that; else itself alone."""
        self._begin()
        waiting, found = [(schema, 0)], list[Any]()
        while waiting and self._step():
            one, depth = waiting.pop()
            one = self._resolved(one)
            said = one.keys() - SAYS_NOTHING if isinstance(one, Mapping) else set[str]()
            is_choice = len(said) == 1 and said <= set(_COMBINED) and depth < MAX_DEPTH
            if is_choice and (inner := _list(one[next(iter(said))])):
                waiting += [(branch, depth + 1) for branch in reversed(inner)]
            else:
                found.append(one)
        return found

    def values(self, schema: Any) -> list[Any] | None:
        """The values of a resolved schema that lists them, those that are of its types; None where it does not."""
        if not isinstance(schema, Mapping) or not ("const" in schema or isinstance(schema.get("enum"), list)):
            return None
        kinds = self.kinds(schema)
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        return [one for one in listed if _common(frozenset({_KIND_OF[type(one)]}), frozenset(kinds))]

    def alone(self, schema: Any) -> Any:
        """The schema as a document of its own, in which its references name what they name here."""
        return extracted(schema, self.root, self._copy) if isinstance(schema, Mapping) else schema

    def _may_go_on(self, schema: Any, above: frozenset[int]) -> bool:
        if not isinstance(schema, Mapping) or id(schema) in above:
            return False
        if len(above) > MAX_DEPTH:
            self.is_exhausted = True
            return False
        return self._step()

    def _kinds(self, schema: Any, above: frozenset[int]) -> frozenset[str] | None:
        """None: it says nothing of types."""
        schema = self._resolved(schema)
        if not self._may_go_on(schema, above):
            return None
        above |= {id(schema)}
        kind = schema.get("type")
        said = [frozenset(name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str))]
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [schema["const"]] if "const" in schema else values
        said.append(frozenset(_KIND_OF[type(value)] for value in values if type(value) in _KIND_OF))
        for name in _COMBINED:
            branches = [self._kinds(one, above) or frozenset() for one in _list(schema.get(name))]
            said.append(frozenset[str]().union(*branches))
        said += [self._kinds(one, above) or frozenset() for one in _list(schema.get("allOf"))]
        found: frozenset[str] = frozenset()
        for one in filter(None, said):
            found = _common(found, one) or found | one if found else one
        return (found | {"null"} if schema.get("nullable") is True and found else found) or None

    def _property(self, schema: Any, name: str, above: frozenset[int], *, declared: bool) -> Any:
        """The schema of a property, made of all that is said of it; None where nothing is."""
        schema = self._resolved(schema)
        if not self._may_go_on(schema, above):
            return None
        above |= {id(schema)}
        found = _own(schema, name, declared=declared)
        for one in _list(schema.get("allOf")):
            found.append(self._property(one, name, above, declared=declared))
        for keyword in _COMBINED:
            options = _list(schema.get(keyword))
            found.append(_any_of(self._property(one, name, above, declared=declared) for one in options))
        dependent = schema.get("dependentSchemas")
        conditional = [*(schema.get(keyword) for keyword in _CONDITIONAL), *_values(dependent)]
        found.append(_any_of(self._property(one, name, above, declared=declared) for one in conditional))
        said = [one for one in found if one is not None]
        return {"allOf": said} if len(said) > 1 else said[0] if said else None


def _own(schema: Mapping[str, Any], name: str, *, declared: bool) -> list[Any]:
    """What the schema itself says of a property: under its name, by pattern, or of all others."""
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    found = [properties[name]] if isinstance(properties, Mapping) and name in properties else []
    if declared:
        return found
    unsure = list[Any]()
    for place, (pattern, one) in enumerate(patterns.items() if isinstance(patterns, Mapping) else ()):
        fits = _fits(pattern, name) if place < MAX_PATTERNS else None
        (unsure if fits is None else found if fits else []).append(one)
    if not found:
        others = [schema[key] for key in ("additionalProperties", "unevaluatedProperties") if key in schema]
        unsure += [one for one in others[:1] if isinstance(one, Mapping)]
        found = unsure if len(unsure) < 2 else [{"anyOf": unsure}]
    return found


def _fits(pattern: str, name: str) -> bool | None:
    """Whether the pattern is in the name; None where a client's pattern might take for ever to tell."""
    repeats = sum(pattern.count(sign) for sign in "*+{?")
    if len(pattern) > MAX_PATTERN or len(name) > MAX_NAME or repeats > MAX_REPEATS or "(" in pattern or "[[" in pattern:
        return None
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):
        return None


def _any_of(schemas: Any) -> Any:
    said = [one for one in schemas if one is not None]
    return {"anyOf": said} if said else None


def _common(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The types that both take: an integer is a number, too."""
    both = ("integer" in one and "number" in other) or ("number" in one and "integer" in other)
    return (one & other) | ({"integer"} if both else set())


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, Mapping) else []
