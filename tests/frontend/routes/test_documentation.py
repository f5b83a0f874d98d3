"""The pages that describe the API are served with the key that all but the probes need, or not at all."""

import base64
import hashlib
import re
from typing import Any

import httpx
import pytest
from doubles import backend_without_mesh
from parsing import RESOLVED
from route_groups import DASHBOARD, DOCUMENTATION, OPERATIONS

from meshlm.frontend.routes.application import Application


def client(**server: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(Application(backend_without_mesh(**server)).app()), base_url="http://localhost"
    )


@pytest.mark.parametrize("op", DOCUMENTATION, ids=lambda op: op.path)
async def test_who_may_read_it(op: Any) -> None:
    async with client() as http:
        answer = await http.get(op.path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, op.answers)
    async with client(api_key=("secret",)) as http:
        assert (await http.get(op.path)).status_code == 401
        assert (await http.get(op.path, headers={"Authorization": "Bearer secret"})).status_code == 200
    async with client(disable_fastapi_docs=True) as http:
        answer = await http.get(op.path)
        assert answer.status_code == 404
        assert "--disable-fastapi-docs" in answer.json()["error"]["message"]


async def test_it_says_what_this_server_has() -> None:
    async with client(max_logprobs=7, api_key=("secret",)) as http:
        api = (await http.get("/openapi.json", headers={"Authorization": "Bearer secret"})).json()
    chat = api["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["model"] == {"enum": [*RESOLVED.served_names, None]}
    assert chat["top_logprobs"]["anyOf"][0]["maximum"] == 7
    assert chat["tools"] == {"enum": [[], None]}, "no parser reads calls"
    assert set(api["paths"]) == {op.path for op in OPERATIONS + DASHBOARD + DOCUMENTATION}


async def test_routes_for_development_are_there_when_asked_for() -> None:
    async with client() as http:
        answer = await http.post("/reset_prefix_cache")
        assert answer.status_code == 404
        assert "--server-dev-mode" in answer.json()["error"]["message"]
        assert "/reset_prefix_cache" not in (await http.get("/openapi.json")).json()["paths"]
    async with client(server_dev_mode=True) as http:
        answer = await http.post("/reset_prefix_cache?reset_external=true")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reset_external")
        answer = await http.post("/reset_prefix_cache?reset_running_requests=perhaps")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reset_running_requests")
        assert "/rebalance_experts" in (await http.get("/openapi.json")).json()["paths"]


async def test_other_methods_are_named() -> None:
    async with client() as http:
        for op in OPERATIONS:
            answer = await http.request("PATCH", op.path)
            assert answer.status_code == 405
            assert set(op.methods) <= set(answer.headers["allow"].split(", "))


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_the_page_does_nothing_and_is_in_no_other(path: str) -> None:
    async with client() as http:
        answer = await http.get(path)
    rules = dict(rule.strip().partition(" ")[::2] for rule in answer.headers["content-security-policy"].split(";"))
    (style,) = re.findall("<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules["style-src"] == f"'sha256-{digest}'"
    assert "script-src" not in rules
    assert {rules[name] for name in ("default-src", "frame-ancestors", "base-uri", "form-action")} == {"'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script" not in answer.text
    assert " style=" not in answer.text
