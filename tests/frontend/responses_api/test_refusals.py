"""What POST /v1/responses refuses, by name, and how it fails."""

from typing import Any

import openai
import pytest
from openai_client import NAMESPACE, TOOLS
from scripted import Scripted

from meshlm.protocol.wire.ids import ErrorKind

Json = dict[str, Any]
BAD: list[tuple[Json, str]] = [
    ({"input": [{"type": "reasoning", "content": [], "summary": [[True], {}]}]}, "input[0].summary"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "content": 0.0}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "summary": ""}]}, "input[0].summary"),
    ({"input": [{"type": "reasoning", "encrypted_content": False}]}, "input[0].encrypted_content"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]."),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"input": [{"type": "function_call_output", "call_id": "", "output": "a"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "item_reference"}]}, "input[0]: items of type 'item_reference'"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]: items of type 'web_search_call'"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAA!"}]}, "input[0].encrypted_content"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop": ""}, "stop"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice: 'required' needs tools"),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "function", "name": "web_search"}},
        "tool_choice: tools of type 'web_search' are not called here",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "rain"}}, "tool_choice: there is no tool 'rain'"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice: type 'file_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice: allowed_tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "rain"}]}},
        "tool_choice: each",
    ),
    ({"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format: "),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs: give"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"min_tokens": 1}, "min_tokens"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning": {"effort": "very"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["everything"]}, "include"),
    ({"metadata": {str(place): "a" for place in range(17)}}, "metadata: at most 16"),
    ({"metadata": {"a": "b" * 513}}, "metadata: names"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages[0].content"),
    ({"previous_input_messages": [{"content": "a"}]}, "previous_input_messages[0].role"),
    (
        {"previous_input_messages": [{"role": "assistant", "content": "a", "tool_calls": 0}]},
        "previous_input_messages[0].tool_calls",
    ),
    (
        {"previous_input_messages": [{"role": "assistant", "content": "a", "reasoning": False}]},
        "previous_input_messages[0].reasoning",
    ),
    (
        {"previous_input_messages": [{"role": "tool", "name": "functions.f", "content": "a"}]},
        "previous_input_messages[0]: no",
    ),
    (
        {"previous_input_messages": [{"role": "assistant", "recipient": "browser.search", "content": "{}"}]},
        "previous_input_messages[0]: calls of 'browser.search'",
    ),
    (
        {"previous_input_messages": [{"role": "user", "content": "a"}], "previous_response_id": "resp_1"},
        "previous_input_messages: give either",
    ),
    (
        {"previous_input_messages": [{"role": "user", "content": "a"}], "conversation": "conv_1"},
        "previous_input_messages: give either",
    ),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [NAMESPACE, NAMESPACE]}, "tools: two functions"),
    (
        {"tools": [NAMESPACE, {**NAMESPACE, "name": "moon"}], "tool_choice": {"type": "function", "name": "weather"}},
        "tool_choice: 2 namespaces",
    ),
    ({"prompt": {"id": "p"}}, "prompt: prompt templates"),
    ({"context_management": [{"type": "compaction"}]}, "context_management: not supported"),
    ({"background": True, "store": False}, "background: "),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options needs"),
    ({"moderation": {"model": "m"}}, "moderation"),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
async def test_what_is_wrong_is_named(client: openai.AsyncOpenAI, fields: Json, text: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/responses", body={"model": "tiny", "input": "hi", **fields}, cast_to=object)
    body: Any = caught.value.body
    assert body["message"].startswith(text)
    assert body["param"] == text.split(":")[0].split("[")[0].split(".")[0].split(" ")[0] or "." in body["param"]


async def test_refusals_of_the_mesh_have_this_apis_names(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces, backend.failure = (), (ErrorKind.INVALID, "too long", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", store=False)
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input="hi")


async def test_a_body_that_is_compressed_is_named(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="content-encoding 'gzip'"):
        await client.responses.create(model="tiny", input="hi", extra_headers={"Content-Encoding": "gzip"})


async def test_a_stream_that_breaks_has_failed(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.failure = (ErrorKind.INTERNAL, "its worker died too often", "")
    events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "its worker died too often")
