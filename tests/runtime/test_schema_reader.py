"""What a schema says of types and properties, through all that JSON schema can put between."""

import contextlib
import time
from typing import Any

import pytest

from meshlm.runtime.parsers.registry import TOOL_PARSERS
from meshlm.runtime.parsers.structures import ParameterStructure
from meshlm.runtime.schema_reader import SchemaReader
from meshlm.runtime.schema_references import TooDeep, TooLarge, moved, target, with_pointers

DEFS: dict[str, Any] = {
    "Count": {"type": "integer"},
    "Color": {"enum": ["red", "green"]},
    "Again": {"$ref": "#/$defs/Count"},
    "Circle": {"$ref": "#/$defs/Circle"},
    "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "boolean"}]},
    "a/b": {"type": "number"},
    "Args": {"type": "object", "properties": {"n": {"$ref": "#/$defs/Count"}}},
}
UNKNOWN = {"object", "array"}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"$ref": "#/$defs/Count"}, {"integer"}),
        ({"$ref": "#/$defs/Again", "description": "x"}, {"integer"}),
        ({"$ref": "#/$defs/a~1b"}, {"number"}),
        ({"allOf": [{"$ref": "#/$defs/Count"}], "title": "x"}, {"integer"}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, {"string"}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/Count"}, {"minimum": 1}]}, {"integer"}),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"$ref": "#/$defs/Count"}, {"type": "boolean"}]}, {"integer", "boolean"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"const": 5}, {"integer"}),
        ({"const": None}, {"null"}),
        ({"const": {"a": 1}}, {"object"}),
        ({"enum": [1, 2.5, "x", None]}, {"integer", "number", "string", "null"}),
        ({"type": "string", "enum": ["1", "2"]}, {"string"}),
        ({"$ref": "#/$defs/Circle"}, UNKNOWN),
        ({"$ref": "#/$defs/Tree"}, {"boolean"}),
        ({"$ref": "#/$defs/none"}, UNKNOWN),
        ({"$ref": "https://elsewhere/x"}, UNKNOWN),
        ({"$ref": "#/$defs/Count", "type": "number"}, {"integer"}),
        (True, UNKNOWN),
        ({}, UNKNOWN),
        ("odd", UNKNOWN),
    ],
)
def test_types(schema: Any, kinds: set[str]) -> None:
    assert SchemaReader({"$defs": DEFS}).kinds(schema) == kinds


N: dict[str, Any] = {"properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("root", "kinds", "is_declared"),
    [
        (N, {"integer"}, True),
        ({"$ref": "#/$defs/Args", "$defs": DEFS}, {"integer"}, True),
        ({"allOf": [{"$ref": "#/$defs/Args"}, {"required": ["n"]}], "$defs": DEFS}, {"integer"}, True),
        ({"anyOf": [N, {"properties": {"n": {"type": "null"}}}, {}]}, {"integer", "null"}, True),
        ({"if": {}, "then": N, "else": {"properties": {"n": {"type": "boolean"}}}}, {"integer", "boolean"}, True),
        ({"dependentSchemas": {"m": N}}, {"integer"}, True),
        ({"additionalProperties": {"type": "integer"}}, {"integer"}, False),
        (
            {"properties": {"m": {}}, "additionalProperties": {"$ref": "#/$defs/Count"}, "$defs": DEFS},
            {"integer"},
            False,
        ),
        ({"properties": {"n": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, {"string"}, True),
        ({"patternProperties": {"^n": {"type": "integer"}, "^m": {"type": "boolean"}}}, {"integer"}, False),
        ({"patternProperties": {"^(a*)*$": {"type": "integer"}}}, {"integer"}, False),
        ({"patternProperties": {"[": {"type": "integer"}}}, {"integer"}, False),
        ({"additionalProperties": True}, UNKNOWN, False),
        ({}, UNKNOWN, False),
        (None, UNKNOWN, False),
    ],
)
def test_properties(root: Any, kinds: set[str], is_declared: bool) -> None:
    reader = SchemaReader(root)
    assert reader.kinds_of("n") == kinds
    assert reader.declares("n") is is_declared


def chain(length: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    found[f"d{length}"] = {"type": "integer"}
    return {"type": "object", "properties": {"n": {"$ref": "#/$defs/d0"}}, "$defs": found}


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"anyOf": [found]}
    return found


PAIR = [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x", "title": "other"}]
TWICE = {
    f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}", "title": "b"}]} for n in range(40)
}
LONG = "k" * 1_000_000
BOMBS: dict[str, dict[str, Any]] = {
    "a chain": chain(10_000),
    "a circle of unions": {"properties": {"n": {"anyOf": PAIR}}, "$defs": {"x": {"anyOf": PAIR}}},
    "a circle of intersections": {"properties": {"n": {"allOf": PAIR}}, "$defs": {"x": {"allOf": PAIR}}},
    "a circle of texts": {
        "properties": {"n": {"anyOf": [{"type": "string"}, *PAIR]}},
        "$defs": {"x": {"anyOf": [{"type": "string"}, *PAIR]}},
    },
    "2 to the 40": {"properties": {"n": {"$ref": "#/$defs/d0"}}, "$defs": TWICE},
    "nested": {"properties": {"n": nested(5000)}},
    "many to one chain": {**chain(900), "properties": {f"n{k}": {"$ref": "#/$defs/d0"} for k in range(5000)}},
    "all of all": {"properties": {f"n{k}": {"$ref": "#", "title": str(k)} for k in range(3000)}},
    "wide siblings": {
        "properties": {"n": {"$ref": "#/$defs/d0"}},
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", **{f"k{n}-{k}": 1 for k in range(100)}} for n in range(999)},
    },
    "patterns": {"patternProperties": {f"^{k}(a*)*$": {"type": "integer"} for k in range(20_000)}},
    "long names": {
        "$defs": {LONG: {f"a{k}": {"$anchor": f"a{k}"} for k in range(3000)}},
        "properties": {"n": {"$ref": "#a5"}},
    },
    "long ids": {
        "$id": LONG,
        "$defs": {f"a{k}": {"$id": LONG[k:]} for k in range(50)},
        "properties": {"n": {"$ref": "a5"}},
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_soon_and_overflow_nothing(name: str) -> None:
    """And no constraint is made of what was not looked at."""
    schema, started = BOMBS[name], time.process_time()
    reader = SchemaReader(with_pointers(schema))
    for key in [*list(schema.get("properties", {}))[:20], "other"]:
        assert reader.kinds_of(key)
    for form in (TOOL_PARSERS[parser].structure for parser in ("qwen3_coder", "pythonic", "functiongemma")):
        with contextlib.suppress(ValueError):
            form.content(schema) if isinstance(form, ParameterStructure) else form.format({"f": schema})  # type: ignore[union-attr]
    assert time.process_time() - started < 10


def test_what_was_not_looked_at_is_no_constraint() -> None:
    assert SchemaReader(chain(500)).kinds_of("n") == {"integer"}
    reader = SchemaReader(chain(10_000))
    assert reader.kinds_of("n") == UNKNOWN
    with pytest.raises(ValueError, match="more references and unions"):
        reader.check()
    with pytest.raises(TooLarge):
        [SchemaReader.alone(made, {"$ref": "#/$defs/d0"}) for made in [SchemaReader(chain(900))] for _ in range(99)]
    with pytest.raises(TooDeep):
        moved(nested(5000), "#", 100)


def test_names_of_schemas_become_pointers() -> None:
    schema: dict[str, Any] = {
        "$id": "https://a.example/tool",
        "type": "object",
        "properties": {
            "by_anchor": {"$ref": "#count"},
            "by_id": {"$ref": "color"},
            "by_uri": {"$ref": "https://a.example/tool#/$defs/c"},
            "inner": {"$ref": "color#shade"},
            "$ref": {"type": "string"},
            "outside": {"$ref": "https://b.example/x"},
            "text": {"const": {"$ref": "#count", "$id": "x"}},
        },
        "$defs": {
            "c": {"$anchor": "count", "type": "integer"},
            "color": {"$id": "color", "enum": [1], "$defs": {"s": {"$anchor": "shade", "type": "boolean"}}},
        },
    }
    found = with_pointers(schema)
    assert {name: one.get("$ref") for name, one in found["properties"].items()} == {
        "by_anchor": "#/$defs/c",
        "by_id": "#/$defs/color",
        "by_uri": "#/$defs/c",
        "inner": "#/$defs/color/$defs/s",
        "$ref": None,
        "outside": "https://b.example/x",
        "text": None,
    }
    assert found["properties"]["text"] == schema["properties"]["text"]
    assert "$id" not in found
    assert "$anchor" not in found["$defs"]["c"]
    assert moved(found, "#/$defs/f")["properties"]["inner"]["$ref"] == "#/$defs/f/$defs/color/$defs/s"
    assert with_pointers({"$id": "urn:a:b", "items": {"$ref": "#/$defs/c"}, "$defs": {"c": {}}})["items"]["$ref"] == (
        "#/$defs/c"
    )


def test_what_stands_beside_a_reference_counts_too() -> None:
    reader = SchemaReader({"$defs": DEFS})
    assert reader.resolved({"type": "object", "$ref": "#/$defs/Args"}) == DEFS["Args"]  # as /v1/messages makes it
    other = {"properties": {"m": {"type": "null"}}}
    both = reader.resolved({**other, "$ref": "#/$defs/Args"})
    assert both == {"allOf": [DEFS["Args"], other]}
    assert [SchemaReader({**both, "$defs": DEFS}).kinds_of(name) for name in "nm"] == [{"integer"}, {"null"}]


@pytest.mark.parametrize(
    ("pointer", "found"), [("#/a/1", 5), ("#", {"a": [4, 5]}), ("#/a/2", None), ("#x", None), (3, None)]
)
def test_targets(pointer: Any, found: Any) -> None:
    assert target({"a": [4, 5]}, pointer) == found


def test_a_schema_alone_has_all_that_it_names() -> None:
    root: dict[str, Any] = {
        "properties": {"a": {"items": {"$ref": "#/properties/b"}}, "b": {"$ref": "#/definitions/c"}},
        "definitions": {"c": {"type": "integer"}, "d": {}},
    }
    found = SchemaReader(root).alone(root["properties"]["a"])
    assert found == {"items": {"$ref": "#/$defs/0"}, "$defs": {"0": {"$ref": "#/$defs/1"}, "1": {"type": "integer"}}}
