"""What a schema says of types and properties, through all that JSON schema can put between."""

import time
from typing import Any

import pytest

from meshlm.runtime.schema_reader import SchemaReader
from meshlm.runtime.schema_references import TooDeep, extracted, moved, target, with_pointers

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


def test_bombs_end_soon_and_overflow_nothing() -> None:
    assert SchemaReader(chain(500)).kinds_of("n") == {"integer"}
    assert SchemaReader(chain(10_000)).kinds_of("n") == UNKNOWN
    assert len(extracted(chain(10_000)["properties"]["n"], chain(10_000))["$defs"]) == 10_001
    pair = [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x", "title": "other"}]
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        nested = {"anyOf": [nested]}
    started = time.process_time()
    for schema in ({"anyOf": pair}, {"allOf": pair}, nested, {"items": nested}):
        reader = SchemaReader({"properties": {"n": {"$ref": "#/$defs/x"}}, "$defs": {"x": schema}, **schema})
        assert reader.kinds_of("n")
        assert reader.branches({"$ref": "#/$defs/x"})
        assert reader.alone({"$ref": "#/$defs/x"})
    assert time.process_time() - started < 5
    with pytest.raises(TooDeep):
        moved(nested, "#", 100)


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
    assert found == {
        "items": {"$ref": "#/$defs/0"},
        "$defs": {"0": {"$ref": "#/$defs/1"}, "1": {"type": "integer"}},
    }
