"""What is looked at in a JSON schema before it becomes a grammar: whether any text of it ends, objects' other properties, and what
the model cannot write. Pure."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from meshlm.runtime.schema_references import target

_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", "unevaluatedProperties",
            "unevaluatedItems", "additionalItems")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ROUNDS = 64  # more than references that do not go round and round need


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for name in _SCHEMAS:
        yield schema.get(name)
    for name in _LISTS:
        if isinstance(found := schema.get(name), list):
            yield from found
    for name in _NAMED:
        if isinstance(found := schema.get(name), dict):
            yield from found.values()


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all within it, but for true and false. Each may be changed before the next is asked for."""
    waiting = [schema]
    while waiting:
        if isinstance(part := waiting.pop(), dict):
            waiting += _parts(part)
            yield part


def count_in_integers(schema: Any) -> None:
    """Counts that are written as 2.0 become integers, which the library wants. Changes the schema."""
    for part in _objects(schema):
        for name in _COUNTS:
            if isinstance(count := part.get(name), float) and count.is_integer():
                part[name] = int(count)


def leave_out_idle(schema: Any) -> None:
    """Keywords that constrain nothing are taken out, since the library knows some of them in no form. Changes the schema."""
    for part in _objects(schema):
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if part.get("propertyNames") in (True, {}, {"type": "string"}):  # names are texts
            del part["propertyNames"]
        if "if" not in part or not {"then", "else"} & part.keys():
            for name in ("if", "then", "else"):
                part.pop(name, None)


def leave_out_patterns(schema: Any, is_read: Callable[[str], bool]) -> None:
    """Patterns that the library cannot read constrain nothing. Changes the schema."""
    for part in _objects(schema):
        if isinstance(pattern := part.get("pattern"), str) and not is_read(pattern):
            del part["pattern"]


def close_objects(schema: Any) -> None:
    """Objects that name properties have no others, where their schema says nothing of them. Changes the schema."""
    for part in _objects(schema):
        if "additionalProperties" not in part and ("properties" in part or "patternProperties" in part):
            part["additionalProperties"] = False


def leave_out(schema: Any, can_write: Callable[[str], bool]) -> str:
    """Constants, choices and names of properties that cannot be written fit nothing any more. Changes the schema; tells the first of
    them, as JSON."""
    first = ""
    for part in _objects(schema):
        wrong = list[str]()

        def fits(value: Any, wrong: list[str] = wrong) -> bool:
            written = json.dumps(value, ensure_ascii=False)
            wrong += [] if can_write(written) else [written]
            return can_write(written)

        if isinstance(choices := part.get("enum"), list):
            part["enum"] = [value for value in choices if fits(value)]
        if "const" in part and not fits(part["const"]):
            part["enum"] = []
        named, required = part.get("properties"), part.get("required")
        names = [*(named if isinstance(named, dict) else ()), *(required if isinstance(required, list) else ())]
        if nameless := [name for name in names if not fits(name)]:
            part["properties"] = {**(named if isinstance(named, dict) else {}), **dict.fromkeys(nameless, False)}
        first = first or "".join(wrong[:1])
    return first


def has_end(root: Any) -> bool:
    """Whether any value of the schema is finite. One that requires itself again and again has none."""
    order: list[dict[str, Any]] = []  # inner schemas before those that need them, but for circles
    seen: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        part, left = waiting.pop()
        if not isinstance(part, dict):
            continue
        if left:
            order.append(part)
        elif id(part) not in seen:
            seen.add(id(part))
            waiting.append((part, True))
            waiting += [(inner, False) for inner in (*_parts(part), target(root, part.get("$ref")))]
    ending: set[int] = set()
    for _ in range(_ROUNDS):
        before = len(ending)
        for part in order:
            if id(part) not in ending and _ends(part, root, ending):
                ending.add(id(part))
        if len(ending) == before:
            break
    return not isinstance(root, dict) or id(root) in ending


def _ends(part: dict[str, Any], root: Any, ending: set[int]) -> bool:
    """Whether a value of it ends, given the schemas of which that is known."""

    def known(schema: Any) -> bool:
        return not isinstance(schema, dict) or id(schema) in ending

    if "enum" in part or "const" in part:
        return True
    if "$ref" in part and not known(target(root, part["$ref"])):
        return False
    for name, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(found := part.get(name), list) and found and not enough(map(known, found)):
            return False
    kinds = part.get("type")
    if kinds in ("object", ["object"]):
        named, required = part.get("properties"), part.get("required")
        named = named if isinstance(named, dict) else {}
        names = required if isinstance(required, list) else []
        return all(known(named.get(name, part.get("additionalProperties"))) for name in names if isinstance(name, str))
    if kinds in ("array", ["array"]):
        least, items, first = part.get("minItems"), part.get("items"), part.get("prefixItems")
        least = least if isinstance(least, int) else 0
        each = first if isinstance(first, list) else items if isinstance(items, list) else []
        return all(map(known, each[:least])) and (least <= len(each) or isinstance(items, list) or known(items))
    return True
