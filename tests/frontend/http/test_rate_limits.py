"""A key that asks too often gets 429 and the time to wait; all frontends of a host count together."""

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from route_groups import OPERATIONS, SPEECH, VECTORS
from scripted import Scripted

from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.frontend.routes.application import PATHS
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Tokenize, TokenizeReply
from meshlm.runtime.api_keys import SCOPES, ApiKey, Limits

KEY = ApiKey(b"k", SCOPES, Limits(rpm=2, tpm=100))
HEADERS = {"Authorization": "Bearer often"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_of_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    one, two = RateLimits(str(tmp_path), clock), RateLimits(str(tmp_path), clock)
    assert (one.take(KEY), two.take(KEY)) == (0.0, 0.0)
    assert two.take(KEY) == one.take(KEY) == pytest.approx(30.0)
    clock.now += 29
    assert one.take(KEY) == pytest.approx(1.0)
    clock.now += 1
    assert one.take(KEY) == 0.0
    clock.now += 1000
    assert [two.take(KEY) == 0.0 for _ in range(3)] == [True, True, False], "no more than a minute's are saved up"


def test_tokens_are_taken_when_they_are_known(tmp_path: Path) -> None:
    clock = Clock()
    rates = RateLimits(str(tmp_path), clock)
    assert rates.take(KEY) == 0.0
    rates.used("k", 150)
    clock.now += 30
    assert rates.take(KEY) == pytest.approx(0.6)
    clock.now += 0.7
    assert rates.take(KEY) == 0.0
    rates.used("nobody", 10**9)


def test_a_key_without_limits_touches_no_file(tmp_path: Path) -> None:
    rates = RateLimits(str(tmp_path / "none"))
    assert {rates.take(ApiKey(b"k", SCOPES)) for _ in range(100)} == {0.0}
    rates.used("k", 5)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/completions", {"prompt": "a"}, {"type": "rate_limit_error", "param": None, "code": 429}),
        ("/v1/messages", {"max_tokens": 1, "messages": []}, {"type": "rate_limit_error"}),
    ],
)
async def test_429_in_the_form_of_the_route(tmp_path: Path, path: str, body: object, error: dict[str, object]) -> None:
    (tmp_path / "keys").write_text("often rpm=1\nfree\n")
    backend = Scripted(ServerConfig(api_key_file=str(tmp_path / "keys"), responses_store="off"))
    backend.rates = RateLimits(str(tmp_path))
    transport = httpx.ASGITransport(backend.routes.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as http:
        first = await http.post("/v1/completions", json={"prompt": "a"})
        again = await http.post(path, json=body)
        models = await http.get("/v1/models")
        other = await http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer free"})
    assert (first.status_code, again.status_code, models.status_code, other.status_code) == (200, 429, 200, 200)
    assert 55 <= int(again.headers["retry-after"]) <= 60
    found = again.json()["error"]
    assert "rpm=1" in found.pop("message")
    assert found == error
    assert backend.submits[0].request_ids
    assert backend.answers[0].parsed_request.api_key == "often"


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/tokenize", {"prompt": "a b"}, 3),  # a byte is a token here
        ("/detokenize", {"tokens": [5, 6, 7, 8]}, 4),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}, 31),
        ("/v1/completions/render", {"prompt": ["a", "bc"]}, 3),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "a"}]}, 31),
        ("/v1/completions/derender", {"generate_responses": [{"choices": [{"index": 0, "token_ids": [5, 6]}]}]}, 2),
    ],
)
async def test_the_tokenizer_alone_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: object, tokens: int
) -> None:
    (tmp_path / "keys").write_text("often rpm=1 tpm=1000\n")
    backend = Scripted(ServerConfig(api_key_file=str(tmp_path / "keys"), responses_store="off"))
    backend.rates = RateLimits(str(tmp_path))
    monkeypatch.setattr(backend, "ask", partial(answered, backend.ask))
    used: list[int] = []
    monkeypatch.setattr(backend.rates, "used", lambda name, num: used.append(num))
    transport = httpx.ASGITransport(backend.routes.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as http:
        first = await http.post(path, json=body)
        again = await http.post(path, json=body)
        answer = await http.post("/v1/completions", json={"prompt": "a"})
    assert (first.status_code, again.status_code, answer.status_code) == (200, 429, 429), first.text
    assert sum(used) == tokens


async def answered(tokenized: Any, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
    if isinstance(message, Detokenize):
        return DetokenizeReply(message.handle, "text")
    reply: TokenizeReply = await tokenized(message)
    return reply


def test_what_counts_is_all_that_computes_or_reads_texts() -> None:
    asked = {op.path for op in (*OPERATIONS, *VECTORS, *SPEECH) if op.methods == ("POST",) and op.body is not None}
    without_limits = {path for path in asked if "{" in path} | {"/settings"}
    assert asked - without_limits <= PATHS.counted
    assert not PATHS.counted & (PATHS.admin | PATHS.information | PATHS.probes)


@pytest.mark.parametrize(
    ("server", "key", "status"),
    [
        (ServerConfig(server_dev_mode=True), "", 200),
        (ServerConfig(server_dev_mode=True, host="0.0.0.0"), "", 403),
        (ServerConfig(server_dev_mode=True, host="0.0.0.0", admin_api_key=("boss-key",)), "", 401),
        (ServerConfig(server_dev_mode=True, host="0.0.0.0", admin_api_key=("boss-key",)), "boss-key", 200),
        (ServerConfig(server_dev_mode=True, api_key=("one",)), "one", 200),
        (ServerConfig(server_dev_mode=True, api_key=("one",), admin_api_key=("boss-key",)), "one", 403),
        (ServerConfig(server_dev_mode=True, api_key=("one",), admin_api_key=("boss-key",)), "boss-key", 200),
    ],
)
async def test_who_may_use_routes_for_development(server: ServerConfig, key: str, status: int) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(Scripted(server).app), base_url="http://localhost")
    async with http:
        answer = await http.get("/server_info", headers={"Authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["message"]
    else:
        assert "boss-key" not in answer.text


@pytest.mark.parametrize(
    ("server", "address", "local"),
    [
        (ServerConfig(), "127.0.0.1", True),
        (ServerConfig(api_key=("k",)), "0.0.0.0", False),
        (ServerConfig(api_key_file="f"), "0.0.0.0", False),
        (ServerConfig(ssl_certfile="c", ssl_cert_reqs=2), "0.0.0.0", False),
        (ServerConfig(ssl_certfile="c"), "127.0.0.1", True),
        (ServerConfig(admin_api_key=("k",)), "127.0.0.1", True),
        (ServerConfig(host="0.0.0.0"), "0.0.0.0", False),
        (ServerConfig(host="localhost", api_key=("k",)), "localhost", True),
        (ServerConfig(host="::1"), "::1", True),
        (ServerConfig(host="gpu-7"), "gpu-7", False),
    ],
)
def test_without_a_key_this_host_alone(server: ServerConfig, address: str, local: bool) -> None:
    assert (server.address, server.is_local) == (address, local)
