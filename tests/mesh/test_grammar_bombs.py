"""Schemas and grammars that a library dies of, by each way that leads to it: refused by the field's name, and no process ends."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_answers import complete, reference
from grammar_bombs import GRAMMARS, PATTERNS, SCHEMAS, SLOW, chain_of_objects
from serving import Serving, serving

pytestmark = pytest.mark.mesh

BOMB = chain_of_objects(1_000)
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LIMIT = "MiB of stack"


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    if "$defs" in schema:
        inner = dict(schema)
        parameters = {"type": "object", "$defs": inner.pop("$defs"), "properties": {"a": inner}, "required": ["a"]}
    return {"name": "f", "parameters": parameters}


def in_chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": MESSAGES, "max_tokens": 8, **fields}


def ways(schema: dict[str, Any], lark: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """By the field that is at fault, and what else there is to say."""
    function, named = tool(schema), {"name": "n", "schema": schema, "strict": True}
    form = {"type": "json_schema", "schema": schema}
    return {
        "structured_outputs": in_chat(structured_outputs={"json": schema}),
        "guided_json": in_chat(guided_json=schema),
        "response_format": in_chat(response_format={"type": "json_schema", "json_schema": named}),
        "tools of required": in_chat(tools=[{"type": "function", "function": function}], tool_choice="required"),
        "tools that are strict": in_chat(tools=[{"type": "function", "function": {**function, "strict": True}}]),
        "output_config.format of messages": (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 8, "output_config": {"format": form}},
        ),
        "text.format of responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 8, "text": {"format": {**form, **named}}}),
        "guided_grammar": in_chat(guided_grammar=lark),
    }  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> Iterator[Serving]:
    flags = ("--device", "fake", "--max-model-len", "2048", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(*flags) as server:
        yield server


def pids(mesh: Serving) -> dict[str, int]:
    return {name: mesh.pid(name) for name in ("frontend", "detokenizer", "coordinator", "scheduler", "worker")}


def posted(mesh: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{mesh.url}{path}", json={"model": "SmolLM2-135M-Instruct", **body}, timeout=300)


def is_served(mesh: Serving) -> None:
    """Text, and text that keeps to a schema."""
    prompt = [300, 301, 302]
    assert complete(mesh, prompt, 8)["choices"][0]["token_ids"] == reference(prompt, 8)
    answer = posted(mesh, CHAT, in_chat(structured_outputs={"json": {"enum": ["left", "right"]}})[1])
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("left", "right")


@pytest.mark.parametrize("field", ways(BOMB, "").keys())
def test_each_way_in_is_a_refusal_by_its_field(mesh: Serving, field: str) -> None:
    before = pids(mesh)
    for schema, told in ((BOMB, LIMIT), (SLOW, "of CPU time to compile")):
        path, body = ways(schema, f"start: %json {json.dumps(schema)}")[field]
        for _ in range(2):
            answer = posted(mesh, path, body)
            assert answer.status_code == 400, answer.text[:300]
            message = answer.json()["error"]["message"]
            assert told in message
            assert field.split()[0] in message
        is_served(mesh)
    assert pids(mesh) == before


@pytest.mark.parametrize("name", [*SCHEMAS, *GRAMMARS, *PATTERNS])
def test_nothing_of_them_ends_a_process(mesh: Serving, name: str) -> None:
    """Refused or not, also where masks are made of it."""
    before = pids(mesh)
    given = {"json": SCHEMAS.get(name), "grammar": GRAMMARS.get(name), "regex": PATTERNS.get(name)}
    answer = posted(mesh, CHAT, {"messages": MESSAGES, "max_tokens": 40, "structured_outputs": given})
    assert answer.status_code in (200, 400), answer.text[:300]
    is_served(mesh)
    assert pids(mesh) == before
