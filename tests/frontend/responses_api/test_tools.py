"""Tools of POST /v1/responses: which of them the model knows, and calls that are forced."""

import json
from typing import Any, cast

import msgspec
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from openai_client import CALL, NAMESPACE, TOOLS, messages_of
from scripted import Scripted
from whole_and_streamed import both


async def test_functions_of_a_namespace(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    """The model knows both names as one; the client has them apart, and sends them back so."""
    backend.pieces = ["hm</think>", CALL.replace('"weather"', '"earth__weather"')]
    asked: Any = [NAMESPACE, {"type": "function", "name": "time"}]
    answer = await both(client, tools=asked)
    (told, time) = (tool["function"] for tool in msgspec.json.decode(backend.prompt.tools_json))
    assert told == {"name": "earth__weather", "parameters": {"type": "object"}}
    assert time == {"name": "time"}
    call: Any = answer.output[-1].to_dict()
    assert (call["name"], call["namespace"]) == ("weather", "earth")
    said = {"description": None, "strict": False}
    inner: Any = [{**one, **said} for one in cast("Any", NAMESPACE)["tools"]]
    assert answer.to_dict()["tools"] == [{**NAMESPACE, "tools": inner}, {**said, "parameters": None, **asked[1]}]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    await both(client, tools=asked, input=[{"role": "user", "content": "hi"}, call, result])
    assert messages_of(backend)[1]["tool_calls"][0]["function"]["name"] == "earth__weather"
    for name in ("weather", "earth__weather"):
        await both(client, tools=asked, tool_choice={"type": "function", "name": name})
        assert backend.submits[-1].extras


async def test_tools_that_a_server_would_run_are_left_out_and_named(
    backend: Scripted, client: openai.AsyncOpenAI
) -> None:
    """As Codex sends one with each turn. They come back as they are."""
    asked: Any = [{"type": "web_search", "external_web_access": False}, {"type": "code_interpreter", "container": "c"}]
    answer: Any = await both(client, tools=[*asked, *TOOLS])
    assert [tool["function"]["name"] for tool in msgspec.json.decode(backend.prompt.tools_json)] == ["weather", "time"]
    assert set(backend.ignored_fields) == {"tools of type code_interpreter", "tools of type web_search"}
    echoed: Any = answer.to_dict()["tools"]
    assert echoed[:2] == asked
    for choice in ("auto", "none"):
        await both(client, tools=asked, tool_choice=choice)
        assert backend.prompt.tools_json == b""
    only: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    await both(client, tools=[*asked, *TOOLS], tool_choice=only)
    assert [tool["function"]["name"] for tool in msgspec.json.decode(backend.prompt.tools_json)] == ["time"]


async def test_an_answer_repeats_all_of_a_function(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    """By Open Responses' schema each function has these fields, in the answer and in the three events that hold one."""
    tools: Any = [
        {"type": "function", "name": "a"},
        {"type": "function", "name": "b", "strict": True, "parameters": {}},
    ]
    stream = await client.responses.create(model="tiny", input="hi", tools=tools, stream=True)
    snapshots = [event.response.to_dict() async for event in stream if hasattr(event, "response")]
    assert len(snapshots) == 3
    for found in snapshots:
        assert found["tools"] == [
            {"type": "function", "name": "a", "description": None, "parameters": None, "strict": False},
            {"type": "function", "name": "b", "description": None, "parameters": {}, "strict": True},
        ]


async def test_only_allowed_tools_are_told(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    answer = await both(client, tools=TOOLS, tool_choice=choice)
    tools = msgspec.json.decode(backend.prompt.tools_json)
    assert [tool["function"]["name"] for tool in tools] == ["time"]
    assert len(answer.tools) == 2


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "weather", "parameters": {"city": "Bärn"}}]'),
        ({"type": "function", "name": "weather"}, '{"city": "Bärn"}'),
    ],
)
async def test_a_call_that_is_forced(backend: Scripted, client: openai.AsyncOpenAI, choice: Any, text: str) -> None:
    backend.pieces = ["hm</think>", text[:20], text[20:]]
    answer = await both(client, tools=TOOLS, tool_choice=choice)
    call = answer.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bärn"})
    assert backend.submits[-1].extras
    assert answer.to_dict()["tool_choice"] == choice


async def test_one_call_where_parallel_ones_are_not_wanted(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["</think>", CALL, CALL]
    answer = await both(client, tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["function_call"]
