"""Headers that every answer has: its name, and the load where a balancer asks for it."""

import json
from typing import Any

import httpx
import pytest
from scripted import Scripted

from meshlm.frontend.http.endpoint import load_report
from meshlm.frontend.routes.application import served
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.control import MeshStats, RankStats
from meshlm.protocol.wire.ids import ErrorKind

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ROUTES = [
    (method, op.path.replace("{response_id}", "resp_1").replace("{conversation_id}", "c").replace("{item_id}", "i"))
    for op in served(documentation=True, development=False, tokenizer_info=True)
    for method in op.methods
]


def rank(dp_rank: int, waiting: int, usage: float) -> RankStats:
    return RankStats(dp_rank, 1, waiting, usage, 0, 0, 0, 0, 0)


STATS = MeshStats(True, ranks=(rank(0, 2, 0.25), rank(1, 1, 0.5)), num_held=4)


def client(backend: Scripted) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(backend.app), base_url="http://localhost")


@pytest.mark.parametrize(
    ("method", "path"), [*ROUTES, ("GET", "/nothing"), ("PUT", "/v1/models"), ("OPTIONS", "/health")]
)
async def test_every_answer_of_every_route_has_a_name(method: str, path: str) -> None:
    """Whether it is an answer or a refusal: the client's own name, else a new one each time."""
    async with client(Scripted()) as http:
        answers = [await http.request(method, path.replace("{model}", "tiny")) for _ in range(2)]
        named = await http.request(method, path.replace("{model}", "tiny"), headers={"X-Request-Id": "mine"})
    names = [answer.headers["x-request-id"] for answer in answers]
    assert len({*names, ""}) == 3
    assert named.headers["x-request-id"] == "mine"
    assert all(len(answer.headers.get_list("x-request-id")) == 1 for answer in (*answers, named))
    if path.startswith("/v1/messages"):
        assert named.headers["request-id"] == "mine"


async def test_without_a_key_too() -> None:
    async with client(Scripted(ServerConfig(api_key=("secret",), responses_store="off"))) as http:
        refused = await http.post("/v1/chat/completions", json=CHAT)
    assert (refused.status_code, bool(refused.headers["x-request-id"])) == (401, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_the_name_that_the_log_has(stream: bool) -> None:
    """Also where the mesh refuses: the answer's id, or the name in the body."""
    backend = Scripted()
    async with client(backend) as http:
        good = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        first = good.text.partition("data: ")[2].partition("\n")[0] if stream else good.text
        assert good.headers["x-request-id"] == json.loads(first)["id"]
        backend.pieces, backend.failure = (), (ErrorKind.INVALID, "too long", "prompt")
        bad = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream, "request_id": "own"})
        assert (bad.status_code, bad.headers["x-request-id"]) == (400, "chatcmpl-own")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "report"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.375, named_metrics.num_requests_waiting=7"),
        ("json", 'JSON {"named_metrics":{"kv_cache_usage_perc":0.375,"num_requests_waiting":7}}'),
        ("BIN", None),
        ("", None),
    ],
)
async def test_the_load_for_a_balancer(form: str, report: str | None, stream: bool) -> None:
    backend = Scripted()
    backend.figures.take(STATS)
    async with client(backend) as http:
        headers = {"endpoint-load-metrics-format": form}
        answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers.get("endpoint-load-metrics") == report
        assert "endpoint-load-metrics" not in (await http.get("/health", headers=headers)).headers


def test_a_mesh_without_ranks_has_no_load() -> None:
    assert load_report("TEXT", MeshStats(False)).startswith("TEXT named_metrics.kv_cache_usage_perc=0")
