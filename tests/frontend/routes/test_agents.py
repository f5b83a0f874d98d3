"""What agents send with their default configuration is served: no field of theirs may become a 400."""

from typing import Any

import httpx
import pytest
from scripted import Scripted

from meshlm.protocol.config import ServerConfig

Json = dict[str, Any]
SCHEMA: Json = {
    "type": "object",
    "properties": {"c": {"type": "string"}},
    "required": ["c"],
    "additionalProperties": False,
}
EPHEMERAL: Json = {"cache_control": {"type": "ephemeral"}}
CODEX: Json = {
    "model": "tiny",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"c": "l', "call_id": "c1"},  # as max_tokens cut it
        {"type": "function_call_output", "call_id": "c1", "output": "not parsed"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
}
CLAUDE_CODE: Json = {
    "model": "tiny",
    "max_tokens": 32_000,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **EPHEMERAL}]}],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: a"},
        {"type": "text", "text": "You are.", **EPHEMERAL},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "d",
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMA},
        }
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
    "temperature": 1,
}
COUNTED = ("model", "messages", "system", "tools", "thinking")


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        (
            "/v1/responses",
            CODEX,
            {"client_metadata", *(f"tools of type {kind}" for kind in ("custom", "web_search", "local_shell"))},
        ),
        ("/v1/messages?beta=true", CLAUDE_CODE, set()),
        ("/v1/messages/count_tokens?beta=true", {name: CLAUDE_CODE[name] for name in COUNTED}, set()),
    ],
)
@pytest.mark.parametrize("reads_calls", [True, False])
async def test_default_configurations_are_served(path: str, body: Json, ignored: set[str], reads_calls: bool) -> None:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_auto_tool_choice": True}
    backend = Scripted(ServerConfig(responses_store="off", **(parsers if reads_calls else {})))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(backend.app), base_url="http://localhost") as client:
        answer = await client.post(path, json=body)
    if not reads_calls and "count_tokens" not in path:
        assert (answer.status_code, "--tool-call-parser" in answer.text) == (400, True)
        return
    assert answer.status_code == 200, answer.text
    assert set(backend.ignored_fields) == ignored
