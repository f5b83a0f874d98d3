"""A server behind a proxy's path, --root-path: the proxy may take it off or leave it; keys are asked for either way."""

import re
from typing import Any

import httpx
import pytest
from scripted import Scripted

from meshlm.protocol.config import ServerConfig
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


@pytest.mark.parametrize("prefix", ["", "/llm/v2"])
async def test_requests_come_with_it_or_without(prefix: str) -> None:
    backend = Scripted(ServerConfig(root_path="/llm/v2", api_key=("one",), responses_store="off"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(backend.app), base_url="http://localhost") as http:
        health = await http.get(f"{prefix}/health")
        refused = await http.get(f"{prefix}/v1/models")
        key = {"Authorization": "Bearer one"}
        models = await http.get(f"{prefix}/v1/models", headers=key)
        done = await http.post(f"{prefix}/v1/completions", headers=key, json={"prompt": "a"})
        document = (await http.get(f"{prefix}/openapi.json", headers=key)).json()
        wrong = await http.get(f"{prefix}/nothing", headers=key)
    assert (health.status_code, refused.status_code, models.status_code, done.status_code) == (200, 401, 200, 200)
    assert document["servers"] == [{"url": "/llm/v2"}]
    assert "/v1/models" in document["paths"]
    assert wrong.json()["error"]["message"].startswith("GET /nothing: there is no such path")


async def test_another_path_is_none() -> None:
    backend = Scripted(ServerConfig(root_path="/llm"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(backend.app), base_url="http://localhost") as http:
        assert (await http.get("/llmore/health")).status_code == 404
        assert (await http.get("/llm")).status_code == 404
        assert (await http.get("/llm/llm/health")).status_code == 404


@pytest.mark.parametrize(
    ("values", "text"),
    [
        *(({"root_path": path}, f"--root-path {path}: must be like") for path in ("llm", "/llm/", "/llm?a=b", "/a//b")),
        ({"grpc": True, "root_path": "/llm"}, "--root-path: it is for HTTP, not for --grpc"),
        (
            {"grpc": True, "enable_per_request_metrics": True},
            "--enable-per-request-metrics: it is for HTTP, not for --grpc",
        ),
    ],
)
def test_what_cannot_be_honoured(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        resolve.resolve(flags.build({"device": "fake", **values}, None))
