"""Bodies nested about as deeply as the interpreter's stack allows, on each API: answered or refused, and never an exception."""

import sys

import httpx
import pytest
from scripted import Scripted

from meshlm.protocol.config import ServerConfig

BODIES = {
    "/api/chat": '{"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
    '"arguments": %s}}]}, {"role": "user", "content": "x"}]}',
    "/api/generate": '{"model": "tiny", "prompt": "x", "format": %s}',
    "/v1/messages": '{"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", '
    '"content": [{"type": "tool_use", "id": "i", "name": "f", "input": %s}]}]}',
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": %s}',
    "/v1/completions": '{"prompt": "x", "guided_json": %s}',
    "/v1/responses": '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": %s}]}',
}


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_body_at_the_edge_of_the_stack(path: str) -> None:
    backend = Scripted(ServerConfig(api=("ollama",)))
    transport = httpx.ASGITransport(app=backend.app)
    statuses = []
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit() + 2):
            deep = '{"a":' * depth + "1" + "}" * depth
            body = BODIES[path] % deep
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            statuses.append(answer.status_code)
    assert set(statuses) <= {200, 400}
    assert statuses[-1] == 400, "it was to be too deep"
