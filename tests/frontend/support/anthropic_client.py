"""Anthropic's own client of a scripted frontend, and what tests ask it."""

import json
from typing import Any

import anthropic
import httpx2
import msgspec
from anthropic.types import Message
from scripted import Scripted

from meshlm.protocol.config import ServerConfig

Json = dict[str, Any]
USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"name": "weather", "description": "of a city", "input_schema": {"properties": {"city": {"type": "string"}}}},
    {"name": "time", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
SERVER = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
OFF: Any = {"type": "disabled"}


def client_of(backend: Scripted, **settings: Any) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(backend.app))
    return anthropic.AsyncAnthropic(
        **{"base_url": "http://localhost", "api_key": "none", "max_retries": 0, "http_client": http, **settings}
    )


async def both(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    """The answer, which is the same whole and as the client puts a stream together."""
    asked: Any = {
        "model": "tiny",
        "max_tokens": 20,
        "messages": USER,
        "extra_headers": {"X-Request-Id": "one"},
        **fields,
    }
    whole: Message = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    first, second = (json.loads(one.to_json()) for one in (whole, streamed))
    for one in (first, second):
        for block in one["content"]:
            block.pop("parsed_output", None)  # the client's own
    assert first == second
    return whole


def messages_of(backend: Scripted) -> list[Json]:
    found: list[Json] = msgspec.json.decode(backend.prompt.messages_json)
    return found
