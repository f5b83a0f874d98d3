"""Routes of plug-ins: what they are given, what becomes of what they raise, and which paths they may not have."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from meshlm.frontend import endpoints
from meshlm.frontend.endpoints import EndpointRequest, Endpoints, PluginRoute, Route
from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.config import MeshConfig
from meshlm.runtime import plugins


async def echo(request: EndpointRequest) -> Any:
    return [request.body, request.query, await request.ask("POST", "/other", {"a": 1})]


async def fail(request: EndpointRequest) -> Any:
    raise KeyError("its own fault")


async def refuse(request: EndpointRequest) -> Any:
    raise ValueError("prompts: there are none")


class Some(Endpoints):
    def routes(self) -> Sequence[Route]:
        return [Route("POST", "/echo", "", echo), Route("GET", "/fail", "", fail, is_admin=True)]


async def ask(request: Request, method: str, path: str, body: bytes) -> Response:
    if path == "/other":
        return Response(body)
    raise HttpError(404, "not here")


def request() -> Request:
    return Request({"type": "http", "method": "POST", "path": "/echo", "headers": [], "query_string": b"q=1"})


async def test_a_route_has_the_body_and_may_ask_others() -> None:
    answer = await PluginRoute("some", Route("POST", "/echo", "", echo)).answer(request(), b'{"b": 2}', ask)
    assert bytes(answer.body) == b'[{"b":2},{"q":"1"},{"a":1}]'


@pytest.mark.parametrize(
    ("handler", "raw", "status", "text"),
    [
        (fail, b"", 500, "plug-in some (group meshlm.endpoints): KeyError: 'its own fault'"),
        (refuse, b"", 400, "prompts: there are none"),
        (echo, b"{", 400, "the body is no JSON"),
    ],
)
async def test_what_it_raises_is_an_error_of_its_own(handler: Any, raw: bytes, status: int, text: str) -> None:
    with pytest.raises(HttpError) as caught:
        await PluginRoute("some", Route("POST", "/x", "", handler)).answer(request(), raw, ask)
    assert caught.value.status == status
    assert text in caught.value.message


def test_paths_that_are_taken_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(group: str, environment: object, register: Any) -> None:
        register("some", Some)

    monkeypatch.setattr(endpoints, "plugins", SimpleNamespace(load=load, ENDPOINTS=plugins.ENDPOINTS))
    found = endpoints.load(MeshConfig(), {}, {})
    assert [(one.route.path, one.operation.key_scope) for one in found] == [("/echo", "inference"), ("/fail", "admin")]
    with pytest.raises(ValueError, match="the path /echo is taken"):
        endpoints.load(MeshConfig(), {"/echo": None}, {})


async def test_the_example_reads_answers_to_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "plugin" / "src"))
    kind = importlib.import_module("meshlm_tiny.trl_routes").TrlRoutes
    asked: list[dict[str, Any]] = []

    async def chat(request: Request, method: str, path: str, body: bytes) -> Response:
        asked.append(json.loads(body))
        logprobs = {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}
        return Response(json.dumps({"prompt_token_ids": [1], "choices": [{"token_ids": [2, 3], "logprobs": logprobs}]}))

    config = MeshConfig()
    monkeypatch.setattr(kind, "__init__", lambda self, config: setattr(self, "config", config))
    routes = kind(SimpleNamespace(resolved=SimpleNamespace(served_names=("m",)), parallel=config.parallel))
    (route,) = (one for one in routes.routes() if one.path == "/chat/")
    body = {"messages": [[{"role": "user", "content": "a"}]], "tools": [{}], "temperature": 0.5}
    answer = await PluginRoute("tiny_trl", route).answer(request(), json.dumps(body).encode(), chat)
    assert json.loads(bytes(answer.body)) == {
        "prompt_ids": [[1]],
        "completion_ids": [[2, 3]],
        "logprobs": [[-0.5, -1.0]],
    }
    assert asked[0]["tools"] == [{}]
    assert (asked[0]["model"], asked[0]["temperature"], asked[0]["logprobs"]) == ("m", 0.5, True)
