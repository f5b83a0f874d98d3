"""Requests to a scripted frontend that has Ollama's API, and its answers' lines put together."""

from typing import Any

import httpx
import msgspec
from scripted import Scripted

from meshlm.protocol.config import ServerConfig

Json = dict[str, Any]
SERVER = ServerConfig(
    api=("ollama",), enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
)
USER = [{"role": "user", "content": "hi"}]
TIMES = ("created_at", "total_duration", "prompt_eval_duration", "eval_duration")


async def ask(backend: Scripted, path: str, body: Json | None = None, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=backend.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        if body is None:
            return await client.get(path, headers=headers)
        named = {"X-Request-Id": "one", **headers}
        return await client.post(path, json={"model": "tiny", **body}, headers=named)


async def lines(backend: Scripted, path: str, body: Json) -> list[Json]:
    """The lines of a stream; only the last is done."""
    answer = await ask(backend, path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    found: list[Json] = [msgspec.json.decode(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


async def both(backend: Scripted, path: str, **body: Any) -> Json:
    """The answer without its times, which is the same whole and put together from a stream's lines."""
    whole: Json = (await ask(backend, path, {**body, "stream": False})).json()
    streamed = await lines(backend, path, body)
    joined = {**streamed[-1]}
    if "message" in whole:
        messages = [line["message"] for line in streamed]
        joined["message"] = {"role": "assistant", **_joined(messages, "content")}
    else:
        joined |= _joined(streamed, "response")
    if logprobs := [one for line in streamed for one in line.get("logprobs", [])]:
        joined["logprobs"] = logprobs
    for one in (whole, joined):
        for name in TIMES:
            one.pop(name, None)
    assert whole == joined
    return whole


def _joined(pieces: list[Json], name: str) -> Json:
    found: Json = {name: "".join(piece[name] for piece in pieces)}
    if thinking := "".join(piece.get("thinking", "") for piece in pieces):
        found["thinking"] = thinking
    if calls := [call for piece in pieces for call in piece.get("tool_calls", [])]:
        found["tool_calls"] = calls
    return found


def messages_of(backend: Scripted) -> list[Json]:
    found: list[Json] = msgspec.json.decode(backend.prompt.messages_json)
    return found
