"""Requests that are refused by their head."""

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from meshlm.frontend.http.endpoint import Gate, load_shedder
from meshlm.frontend.routes.application import PATHS

FULL = "4 requests are waiting already (--max-waiting)"


class Door:
    """A gate before an app that reads the body and says so."""

    def __init__(self, reason: str = FULL) -> None:
        self.reason = reason
        self.asked: list[bool] = []
        self.times: list[float] = []
        check = load_shedder(self._refusal, PATHS.submits)
        self.gate = Gate(self._app, check, lambda _, seconds: self.times.append(seconds), PATHS.submits)

    def _refusal(self, *, attaches: bool) -> str:
        self.asked.append(attaches)
        return "" if attaches else self.reason

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    def client(self) -> TestClient:
        return TestClient(self.gate)


def test_a_new_request_is_refused_and_told_when_to_come_again() -> None:
    door = Door()
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = door.client().post(path, json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = answer.json()["error"]
        assert (error["message"], error["type"]) == (FULL, "overloaded_error")
        assert "connection" not in answer.headers
    assert door.asked == [False, False]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/batch", "/inference/v1/generate", "/invocations", "/v1/embeddings"]
)
def test_each_route_that_computes_is_refused(path: str) -> None:
    assert Door().client().post(path, json={}).status_code == 503


def test_one_that_may_attach_goes_on_and_so_does_everything_when_there_is_room() -> None:
    assert Door().client().post("/v1/completions", headers={"idempotency-KEY": "k"}).text == "done"
    assert Door("").client().post("/v1/completions").text == "done"


def test_other_routes_are_not_asked() -> None:
    door = Door()
    assert door.client().get("/health").text == "done"
    assert door.client().get("/v1/completions").text == "done"
    assert door.client().post("/tokenize").text == "done"
    assert door.asked == []


def test_a_client_that_waits_before_it_sends_its_body_is_hung_up_on() -> None:
    answer = Door().client().post("/v1/completions", headers={"Expect": "100-continue"})
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")


def test_the_body_is_not_read() -> None:
    async def never() -> Any:
        raise AssertionError("it asked for the body")

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    door = Door()
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    asyncio.run(door.gate({**scope, "extensions": {"meshlm.transport": {"begun": 1.0}}}, never, send))
    assert sent[0]["status"] == 503
    assert len(door.times) == 1
    assert door.times[0] > 0
