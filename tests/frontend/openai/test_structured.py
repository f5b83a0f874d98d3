"""response_format, structured_outputs and guided_* become the grammar that travels with the request."""

import json
from typing import Any

import msgspec
import pytest
from parsing import ENDPOINTS, RESOLVED, SERVER, USER, ask, asked, body_of, refused

from meshlm.frontend.openai.limits import MAX_COPIED_BYTES
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"$ref": "#"}}}
TEXT = msgspec.json.encode(SCHEMA).decode()
TAG = {"triggers": ["<a"], "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]}
JSON, REGEX, TAGS = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.STRUCTURAL_TAG


def of(**fields: Any) -> Grammar | None:
    return find_extra(ask("chat", **fields).mesh.extras, Grammar)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT, "", "response_format.type")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
            Grammar(JSON, TEXT, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Grammar(JSON, TEXT, "response_format.json_schema.schema", strict=False),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "regex": None}},
            Grammar(JSON, TEXT, "structured_outputs.json", whitespace_pattern=" ?"),
        ),
        (
            {"structured_outputs": {"json": TEXT, "disable_any_whitespace": True, "disable_additional_properties": True}},
            Grammar(JSON, TEXT, "structured_outputs.json", any_whitespace=False, additional_properties=False),
        ),
        ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_OBJECT, "", "structured_outputs.json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(REGEX, "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar(GrammarKind.CHOICE, '["é","b"]', "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "x"}}, Grammar(GrammarKind.GRAMMAR, "x", "structured_outputs.grammar")),
        ({"guided_json": SCHEMA}, Grammar(JSON, TEXT, "guided_json")),
        ({"guided_json": TEXT, "guided_whitespace_pattern": ""}, Grammar(JSON, TEXT, "guided_json")),
        ({"guided_json": {}}, Grammar(JSON, "{}", "guided_json")),
        ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, Grammar(REGEX, "a+", "guided_regex")),
        ({"guided_choice": ["a"]}, Grammar(GrammarKind.CHOICE, '["a"]', "guided_choice")),
        ({"guided_grammar": "x"}, Grammar(GrammarKind.GRAMMAR, "x", "guided_grammar")),
        ({"guided_json_object": True}, Grammar(GrammarKind.JSON_OBJECT, "", "guided_json_object")),
        ({"guided_json_object": False}, None),
        ({"structural_tag": json.dumps(TAG)}, Grammar(TAGS, json.dumps(TAG), "structural_tag")),
    ],
)  # fmt: skip
def test_the_fields_of_a_request(endpoint: str, fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert find_extra(ask(endpoint, **fields).mesh.extras, Grammar) == grammar


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "structural_tag", **TAG}}, {"structured_outputs": {"structural_tag": TAG}}]
)
def test_structural_tags(fields: dict[str, Any]) -> None:
    found = of(**fields)
    assert found is not None
    assert found.kind is TAGS
    assert {name: json.loads(found.text)[name] for name in TAG} == TAG


def test_the_order_of_properties_stays() -> None:
    found = of(guided_json=SCHEMA)
    assert found is not None
    assert list(json.loads(found.text)["properties"]) == ["z", "a"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_two_constraints_are_refused(endpoint: str) -> None:
    raised, error = refused(endpoint, {"guided_regex": "a", "response_format": {"type": "json_object"}})
    assert (raised.status, error["param"]) == (400, "guided_regex")
    assert "response_format, guided_regex" in str(error["message"])


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"backtrack": 1, "regex": "a"},
        {"regex": "a", "whitespace_pattern": []},
        {"regex": "a", "whitespace_pattern": False},
        {"regex": "a", "disable_any_whitespace": 0},
        {"regex": "a", "disable_any_whitespace": ""},
        {"regex": "a", "disable_additional_properties": 0},
        {"regex": "a", "choice": False},
    ],
)
def test_the_error_names_the_field(value: dict[str, Any]) -> None:
    raised, error = refused("chat", {"structured_outputs": value})
    assert (raised.status, error["param"]) == (400, "structured_outputs")


def test_copies_for_many_choices_are_counted() -> None:
    raised, error = refused("text", {"guided_regex": "a" * (MAX_COPIED_BYTES // 100), "n": 101})
    assert (raised.status, error["param"]) == (400, "guided_regex")


@pytest.mark.parametrize(
    ("parser", "kwargs", "between"),
    [
        ("", {}, ("", "")),
        ("qwen3", {}, ("", "</think>")),
        ("qwen3", {"enable_thinking": False}, ("", "")),
        ("<why>...</why>", {}, ("<why>", "</why>")),
    ],
)
def test_it_begins_behind_the_reasoning(parser: str, kwargs: dict[str, Any], between: tuple[str, str]) -> None:
    body = body_of("chat", {"guided_regex": "a", "chat_template_kwargs": kwargs, "messages": [USER]})
    for config, expected in (("{}", between), ('{"enable_in_reasoning": true}', ("", ""))):
        server = ServerConfig(reasoning_parser=parser, structured_outputs_config=config)
        found = find_extra(asked("chat", body, RESOLVED, server).mesh.extras, Grammar)
        assert found is not None
        assert (found.opens_with, found.begins_after) == expected


def test_the_servers_options() -> None:
    config = '{"backend": "guidance", "disable_any_whitespace": true, "disable_additional_properties": true}'
    server = msgspec.structs.replace(SERVER, structured_outputs_config=config)
    found = find_extra(asked("text", body_of("text", {"guided_json": SCHEMA}), RESOLVED, server).mesh.extras, Grammar)
    assert found == Grammar(JSON, TEXT, "guided_json", any_whitespace=False, additional_properties=False)
