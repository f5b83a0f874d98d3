"""What POST /v1/messages refuses, by name, and how it fails."""

from typing import Any

import anthropic
import pytest
from anthropic_client import TOOLS, USER, client_of
from scripted import Scripted

from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import ChatPrompt
from meshlm.protocol.wire.ids import ErrorKind

Json = dict[str, Any]
BAD: list[tuple[Json, str]] = [
    ({"messages": []}, "messages: give at least one"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0: blocks of"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0"),
    ({"messages": [*USER, {"role": "user", "content": []}]}, "messages.1.content: give at least one block"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": 0.5}]}]},
        "messages.0.content.0.is_error",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 1}]}]},
        "messages.0.content.0.content",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": []}]}]},
        "messages.0.content.0.input",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages.0.content.0: blocks"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": {}}]}]},
        "messages.0.content.0.id: must not be empty",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "", "input": {}}]}]},
        "messages.0.content.0.name: must not be empty",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]}]},
        "messages.0.content.0.tool_use_id: must not be empty",
    ),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences: each"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0: tools of type 'bash_20250124'"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
        "tool_choice: 'any' needs tools",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "rain"}}, "tool_choice.name: there is no tool 'rain'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"thinking": {"type": "perhaps"}}, "thinking"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers: not supported"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format"),
    ({"container": "c"}, "container: not supported"),
    ({"context_management": {"edits": [{}]}}, "context_management.edits.0: edits of type 'None'"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0: edits of type 'clear_tool",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]}},
        "context_management.edits.0.keep",
    ),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"thread": {"type": "continue", "message_id": "msg_1"}}, "thread: not supported on this path"),
    ({"guided_json": {"type": "object"}}, "guided_json: not supported on this path; output_config.format is"),
    ({"response_format": {"type": "json_object"}}, "response_format: not supported on this path"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget: not supported"),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
async def test_what_is_wrong_is_named(client: anthropic.AsyncAnthropic, fields: Json, text: str) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 20, "messages": USER}
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.post("/v1/messages", body={**asked, **fields}, cast_to=object)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(text)


async def test_thinking_needs_a_parser() -> None:
    """A server that cannot tell reasoning from an answer refuses what asks for it, and takes what leaves it to the model."""
    backend = Scripted()
    async with client_of(backend) as client:
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match="--reasoning-parser"):
            await client.messages.create(model="tiny", messages=USER, max_tokens=9, thinking=enabled)
        await client.messages.create(model="tiny", messages=USER, max_tokens=9, thinking={"type": "adaptive"})


async def test_a_server_that_reads_no_calls_counts_the_tokens_of_tools_and_of_thinking() -> None:
    """Nothing is generated, so nothing is to be read. The tools are in the prompt."""
    backend = Scripted(ServerConfig(exclude_tools_when_tool_choice_none=True))
    async with client_of(backend) as client:
        with pytest.raises(anthropic.BadRequestError, match="--tool-call-parser"):
            await client.messages.create(model="tiny", messages=USER, tools=TOOLS, max_tokens=1)
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        found = await client.messages.count_tokens(model="tiny", messages=USER, tools=TOOLS, thinking=enabled)
        assert found.input_tokens
        (question,) = backend.questions
        assert isinstance(question.prompt, ChatPrompt)
        assert b"weather" in question.prompt.tools_json


async def test_tools_of_anthropics_server_are_left_out(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    """As Claude Code may send them beside its own; a log line names them. Its display "updates" is taken."""
    tools: Any = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, *TOOLS]
    thinking: Any = {"type": "adaptive", "display": "updates"}
    await client.messages.create(model="tiny", messages=USER, tools=tools, max_tokens=1, thinking=thinking)
    assert b"web_search" not in backend.prompt.tools_json
    assert b"weather" in backend.prompt.tools_json
    assert backend.ignored_fields == ("tools of type web_search_20250305",)


async def test_errors_have_anthropics_form(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="other", messages=USER, max_tokens=9)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        await client.get("/v1/messages/batches", cast_to=object)
    with pytest.raises(anthropic.APIStatusError) as method:
        await client.get("/v1/messages", cast_to=object)
    body: Any = method.value.body
    assert (method.value.status_code, body["type"]) == (405, "error")
    backend.pieces, backend.failure = (), (ErrorKind.OVERLOADED, "full", "")
    with pytest.raises(anthropic.InternalServerError) as full:
        await client.messages.create(model="tiny", messages=USER, max_tokens=9)
    assert (full.value.status_code, full.value.type) == (503, "overloaded_error")


async def test_a_stream_that_breaks_says_so(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    backend.failure = (ErrorKind.INTERNAL, "its worker died too often", "")
    with pytest.raises(anthropic.APIStatusError, match="died too often"):
        async with client.messages.stream(model="tiny", messages=USER, max_tokens=9) as stream:
            await stream.get_final_message()


@pytest.mark.parametrize("how", [{"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}])
async def test_either_header_has_the_key(how: Any) -> None:
    backend = Scripted(ServerConfig(api_key=("other", "secret")))
    async with client_of(backend, **how) as client:
        assert (await client.messages.create(model="tiny", messages=USER, max_tokens=9)).content
    async with client_of(backend, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="tiny", messages=USER, max_tokens=9)
    assert caught.value.type == "authentication_error"
