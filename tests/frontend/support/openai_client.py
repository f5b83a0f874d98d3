"""OpenAI's own client of a scripted frontend, and the tools that tests give it."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import openai
from scripted import Scripted

from meshlm.protocol.config import ServerConfig

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "time", "parameters": None, "strict": None},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
NAMESPACE: Any = {
    "type": "namespace",
    "name": "earth",
    "description": "d",
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}],
}
SERVER = ServerConfig(
    enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3", responses_store="off"
)
OFF = {"effort": "none"}
LIMIT_S = 20
Frontend = Callable[..., Scripted]
Json = dict[str, Any]


def client_of(backend: Scripted, api_key: str = "none") -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(backend.app))
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=api_key, max_retries=0, http_client=http)


async def ended(client: openai.AsyncOpenAI, response_id: str) -> openai.types.responses.Response:
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = await client.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


def messages_of(backend: Scripted) -> list[Json]:
    found: list[Json] = msgspec.json.decode(backend.prompt.messages_json)
    return found
