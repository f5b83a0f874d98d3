"""Each request that gets an error instead of an answer is counted by its reason, which has few values whatever clients send."""

import gc
import types

import httpx
import pytest
from scripted import Scripted

from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.wire.ids import ErrorKind


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (HttpError(503, "9 requests are waiting already (--max-waiting)"), "max_waiting"),
        (HttpError(503, "too many open requests (--max-concurrent-requests)"), "max_concurrent_requests"),
        (HttpError(413, "the body exceeds 9 bytes (--max-body-bytes)"), "max_body_bytes"),
        (HttpError(503, "no scheduler with ready workers"), "not_ready"),
        (HttpError(400, "prompt: what --max-waiting is"), "invalid"),
        (HttpError(401, "Unauthorized"), "unauthorized"),
        (HttpError(422, "the key stands for another request"), "conflict"),
        (HttpError(500, "the worker died"), ""),
        (HttpError(504, "the request's timeout passed"), ""),
    ],
)
def test_the_reason_is_a_flag_or_what_the_status_means(error: HttpError, reason: str) -> None:
    assert error.reason() == reason


async def test_refusals_of_requests_for_answers_are_counted() -> None:
    backend = Scripted(ServerConfig(responses_store="off", api_key=("secret",)))
    transport = httpx.ASGITransport(backend.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        key = {"Authorization": "Bearer secret"}
        await client.post("/v1/completions", json={"prompt": 1.5}, headers=key)
        backend.failure = (ErrorKind.OVERLOADED, "5 requests are waiting already (--max-waiting)", "")
        await client.post("/v1/completions", json={"prompt": "x"}, headers=key)
        await client.post("/tokenize", json={"prompt": 1.5}, headers=key)  # asks for no answer
    assert backend.refusals == ["unauthorized", "invalid", "max_waiting"]


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/v1/models", "wrong", 401),
        ("POST", "/v1/completions", "wrong", 401),
        ("POST", "/v1/completions", "secret", 400),
        ("GET", "/settings", "secret", 403),
        ("GET", "/nowhere", "secret", 404),
        ("GET", "/v1/completions", "secret", 405),
    ],
)
async def test_a_refusal_leaves_nothing_behind(method: str, path: str, key: str, status: int) -> None:
    """An exception that outlives its request keeps the frames that raised it, with what the client sent."""
    server = ServerConfig(responses_store="off", api_key=("secret",), admin_api_key=("other",))
    transport = httpx.ASGITransport(Scripted(server).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def refused() -> None:
            answer = await client.request(method, path, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status

        await refused()
        before = num_frames_kept()
        for _ in range(20):
            await refused()
        assert num_frames_kept() - before < 20


def num_frames_kept() -> int:
    gc.collect()
    return sum(type(one) is types.TracebackType for one in gc.get_objects())  # isinstance asks lazy objects of torch
