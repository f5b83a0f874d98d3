"""Each request that gets an error instead of an answer is counted by its reason, which has few values whatever clients send."""

import httpx
import pytest
from scripted import Scripted

from meshlm.frontend.errors import HttpError
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.ids import ErrorKind


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
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        key = {"Authorization": "Bearer secret"}
        await client.post("/v1/completions", json={"prompt": 1.5}, headers=key)
        backend.failure = (ErrorKind.OVERLOADED, "5 requests are waiting already (--max-waiting)", "")
        await client.post("/v1/completions", json={"prompt": "x"}, headers=key)
        await client.post("/tokenize", json={"prompt": 1.5}, headers=key)  # asks for no answer
    assert backend.refusals == ["unauthorized", "invalid", "max_waiting"]
