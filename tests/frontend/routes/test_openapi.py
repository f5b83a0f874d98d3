"""/openapi.json describes every route, and /docs shows it without anything from elsewhere."""

import ast
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import HELLO, OF_PROMPT, PROMPT_IDS, STOP, asking, give, whole
from jsonschema import Draft202012Validator
from route_groups import DOCUMENTATION, OPERATIONS

from meshlm.frontend.http.errors import NOT_SERVED, STATUS
from meshlm.frontend.openai import response_schema
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meshlm.frontend.rendering.schema import BatchChatRequest
from meshlm.frontend.routes import openapi
from meshlm.frontend.routes.application import OPERATIONS as ALL
from meshlm.frontend.routes.application import served
from meshlm.frontend.routes.request_schema import Served
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.pooling import PoolingSpec

Json = dict[str, Any]
SERVED = Served(("tiny",), 100, 20, takes_tools=True, takes_templates=False, takes_priorities=False)
OPEN, KEYED = (
    openapi.document(served(documentation=True, development=True), "1.2", keys, SERVED) for keys in (False, True)
)


def references(value: object) -> list[str]:
    if isinstance(value, dict):
        mine = [value["$ref"]] if "$ref" in value else []
        return mine + [ref for inner in value.values() for ref in references(inner)]
    return [ref for inner in value for ref in references(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize("api", [OPEN, KEYED], ids=["open", "keyed"])
def test_the_document_is_whole(api: Json) -> None:
    found = json.loads(msgspec.json.encode(api))
    assert set(references(found)) <= {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    for schema in found["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = [one["operationId"] for methods in found["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))
    assert list(found["paths"]) == list(dict.fromkeys(op.path for op in served(documentation=True, development=True)))


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_each_field_of_a_body_is_there(kind: type[msgspec.Struct]) -> None:
    schema = OPEN["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == set(kind.__struct_fields__)


def test_a_batch_declares_what_it_takes_of_a_chat() -> None:
    """The fields that it narrows are narrow in its schema, too."""
    properties = OPEN["components"]["schemas"]["BatchChatRequest"]["properties"]
    wrong = {"n": 2, "stream": True, "use_beam_search": True, "tools": [], "tool_choice": "auto", "prompt_logprobs": 1}
    assert set(wrong) | {"messages"} == set(BatchChatRequest.__annotations__)
    assert [name for name, value in wrong.items() if Draft202012Validator(properties[name]).is_valid(value)] == []


def test_who_needs_a_key() -> None:
    assert "security" not in OPEN
    assert KEYED["security"] == [{"key": []}]
    for op in served(documentation=True, development=True):
        one = KEYED["paths"][op.path][op.methods[0].lower()]
        assert (one.get("security") == []) == op.is_open == ("401" not in one["responses"])


def test_generation_names_every_status_that_an_error_may_have() -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert {str(status) for status in STATUS.values()} | {"200", "413"} <= set(
            OPEN["paths"][path]["post"]["responses"]
        )


def test_every_status_of_the_source_is_declared() -> None:
    """Each number that an HttpError is made with anywhere in the frontend stands in the document."""
    folder = Path(openapi.__file__).parents[1]
    made = {
        node.args[0].value
        for file in folder.rglob("*.py")
        if file.parent.name != "grpc"  # whose statuses are its own
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "HttpError"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    declared = {
        int(status)
        for api in (OPEN, KEYED)
        for methods in api["paths"].values()
        for one in methods.values()
        for status in one["responses"]
    }
    assert {400, 401, 404, 413, 503} <= made <= declared
    assert all("503" in one["responses"] for methods in KEYED["paths"].values() for one in methods.values())


def test_without_documentation() -> None:
    assert served(documentation=False, development=False) == OPERATIONS
    assert {op.path for op in DOCUMENTATION} <= set(NOT_SERVED)


class Links(HTMLParser):
    """What a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str | None] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href")]
        assert tag not in ("script", "link", "img", "iframe")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_all_of_it_and_loads_nothing() -> None:
    page = Links()
    page.feed(openapi.page(KEYED))
    assert page.links == ["openapi.json"]
    for path in KEYED["paths"]:
        assert path in page.text
    for name in (*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "Retry-After"):
        assert name in page.text


def test_text_cannot_become_tags() -> None:
    assert "<b>x" not in openapi.page(
        openapi.document(served(documentation=True, development=True), "<b>x", False, SERVED)
    )


PLAIN: Json = {"return_token_ids": True, "logprobs": 1, "prompt_logprobs": 1}
CALLS: Json = {"tool_call_parser": "hermes", "begins_with_reasoning": True}
CALL = 'a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("is_chat", "fields", "text"),
    [(True, {}, "x"), (True, PLAIN, "x"), (True, CALLS, CALL), (False, {}, "x"), (False, PLAIN, "x")],
)
def test_answers_are_as_declared(is_chat: bool, fields: Json, text: str) -> None:
    """Each field of an answer is declared, and has the type that is."""
    answer, _ = whole(asking(is_chat, **fields))
    give(
        answer,
        0,
        PROMPT_IDS[:1],
        text,
        STOP,
        [HELLO] if "logprobs" in fields else None,
        OF_PROMPT if fields == PLAIN else None,
        1,
    )
    kind = response_schema.ChatCompletionResponse if is_chat else response_schema.CompletionResponse
    found = json.loads(answer.body())
    read = msgspec.convert(found, kind)
    assert missing(found, msgspec.to_builtins(read)) == []


def missing(sent: object, read: object, where: str = "") -> list[str]:
    """The fields that were sent and not declared."""
    if isinstance(sent, dict) and isinstance(read, dict):
        return [f"{where}.{key}" for key in sent.keys() - read.keys()] + [
            lost for key in sent.keys() & read.keys() for lost in missing(sent[key], read[key], f"{where}.{key}")
        ]
    if isinstance(sent, list) and isinstance(read, list):
        return [lost for one, other in zip(sent, read, strict=True) for lost in missing(one, other, where)]
    return []


def test_the_page_shows_the_routes_of_every_server() -> None:
    api = openapi.document(ALL, "1.2", True, SERVED)
    text = openapi.page(api)
    assert all(f"<code>{path}</code>" in text for path in api["paths"])


BERT = PoolingSpec(tasks=("embed", "token_embed"), kind=PoolKind.MEAN, size=384, prompts={"query": "query: "})
CROSS = PoolingSpec(tasks=("classify",), kind=PoolKind.CLS, size=1, matryoshka=True)
OF_VECTORS: list[tuple[str, PoolingSpec, Json, bool]] = [
    ("EmbeddingRequest", BERT, {"input": "a"}, True),
    ("EmbeddingRequest", BERT, {"input": ["a", "b"], "truncate_prompt_tokens": 256}, True),
    ("EmbeddingRequest", BERT, {"input": ""}, False),
    ("EmbeddingRequest", BERT, {"input": [[1], []]}, False),
    ("EmbeddingRequest", BERT, {"input": "a", "truncate_prompt_tokens": 257}, False),
    ("EmbeddingRequest", BERT, {"input": "a", "dimensions": 8}, False),
    ("EmbeddingRequest", msgspec.structs.replace(BERT, matryoshka=True), {"input": "a", "dimensions": 8}, True),
    ("EmbeddingRequest", BERT, {"messages": [{"role": "user", "content": "a"}]}, True),
    ("EmbeddingRequest", BERT, {"messages": [[{"role": "user", "content": "a"}]]}, True),
    ("EmbeddingRequest", BERT, {"messages": [[]]}, False),
    ("EmbeddingRequest", BERT, {"messages": "a"}, False),
    ("PoolingRequest", BERT, {"input": "a", "task": "token_embed"}, True),
    ("PoolingRequest", BERT, {"input": "a", "task": "classify"}, False),
    ("ScoreRequest", BERT, {"text_1": "a", "text_2": ["b"]}, True),
    ("ScoreRequest", BERT, {"text_1": "a", "text_2": []}, False),
    ("ScoreRequest", BERT, {"text_1": "a", "documents": "b"}, False),
    ("ScoreRequest", BERT, {"queries": "a", "documents": "b", "max_tokens_per_doc": 9}, False),
    ("ScoreRequest", CROSS, {"queries": "a", "documents": "b", "max_tokens_per_doc": 9}, True),
    ("ScoreRequest", CROSS, {"queries": "a", "documents": "b", "max_tokens_per_doc": 256}, False),
    ("RerankRequest", CROSS, {"query": "a", "documents": [{"text": "b"}, "c"]}, True),
    ("RerankRequest", CROSS, {"query": "a", "documents": [{"image": "b"}]}, False),
    ("RerankRequest", CROSS, {"query": "a", "documents": []}, False),
    ("CohereEmbedRequest", BERT, {"texts": ["a"], "input_type": "query"}, True),
    ("CohereEmbedRequest", BERT, {"texts": ["a"], "input_type": "other"}, False),
    ("CohereEmbedRequest", BERT, {"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, True),
    ("CohereEmbedRequest", BERT, {"texts": ["a"], "inputs": [{"content": [{"text": "a"}]}]}, False),
    ("CohereEmbedRequest", BERT, {"images": ["a"]}, False),
]


@pytest.mark.parametrize(("name", "spec", "body", "is_right"), OF_VECTORS)
def test_bodies_for_vectors_say_what_the_model_takes(name: str, spec: PoolingSpec, body: Json, is_right: bool) -> None:
    """As tests/frontend/vectors/test_vector_bodies.py has it of the server."""
    facts = msgspec.structs.replace(SERVED, pooling=spec, max_model_len=256)
    api = openapi.document(ALL, "1.2", True, facts)
    schema = {**api["components"]["schemas"][name], "components": api["components"]}
    assert Draft202012Validator(schema).is_valid(body) is is_right
