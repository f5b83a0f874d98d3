"""Small texts that a grammar library dies of, or is busy with for long: what strangers send as schemas, patterns and grammars."""

import json
from typing import Any


def chain_of_references(length: int) -> dict[str, Any]:
    named: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    return {"$defs": {**named, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def chain_of_objects(length: int) -> dict[str, Any]:
    """85 KB of 1,000 definitions."""

    def link(following: int) -> dict[str, Any]:
        properties = {"a": {"$ref": f"#/$defs/d{following}"}}
        return {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}

    named = {f"d{n}": link(n + 1) for n in range(length)}
    return {"$defs": {**named, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def nested_arrays(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain_of_rules(length: int) -> str:
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(length))
    return f'start: r0\n{rules}\nr{length}: "a"\n'


def chain_of_terminals(length: int) -> str:
    rules = "\n".join(f"T{n}: T{n + 1}" for n in range(length))
    return f'start: T0\n{rules}\nT{length}: "a"\n'


def nested_groups(depth: int) -> str:
    return "start: " + "(" * depth + '"a"' + ")" * depth


SLOW = {"type": "integer", "multipleOf": 999_983}
SCHEMAS: dict[str, dict[str, Any]] = {
    "references of objects, 1,000": chain_of_objects(1_000),
    "references of objects, 1,200": chain_of_objects(1_200),
    "references, 3,000": chain_of_references(3_000),
    "slow": SLOW,
    "nested": nested_arrays(120),
    "enum": {"enum": [f"{n}-value" for n in range(12_000)]},
    "states": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
}
PATTERNS = {
    "repeated": "a{1,10000}{1,10000}",
    "thrice": "((a{1,1000}){1,1000}){1,1000}",
    "nested groups": "(" * 5000 + "a" + ")" * 5000,
    "optional": "(a?){1,1000}(a{1,1000}|b){1,1000}",
}
GRAMMARS = {
    "rules": chain_of_rules(9_000),
    "terminals": chain_of_terminals(9_000),
    "groups": nested_groups(20_000),
    "schema": f"start: %json {json.dumps(chain_of_objects(1_000))}",
    "schemas": "start: " + " ".join(f"%json {json.dumps({'type': 'array', 'items': SLOW})}" for _ in range(3)),
}
