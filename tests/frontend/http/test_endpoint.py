"""A request that the end of the server cuts off is answered where it can be, and is no error in the log."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from meshlm.frontend.http.endpoint import Endpoint


async def cut_off(*, started: bool) -> list[Any]:
    """What it sends when it is cancelled while the body is awaited."""
    sent: list[Any] = []
    waits = asyncio.Event()

    async def send(message: Any) -> None:
        if started:
            raise RuntimeError("Unexpected ASGI message 'http.response.start'")
        sent.append(message)

    async def receive() -> Any:
        waits.set()
        await asyncio.get_running_loop().create_future()

    async def read(request: Request) -> Response:
        return Response(await request.body())

    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": []}
    task = asyncio.create_task(Endpoint(read, None)(scope, receive, send))
    await asyncio.wait_for(waits.wait(), 10)
    task.cancel()
    await asyncio.wait_for(task, 10)  # not CancelledError, of which uvicorn logs a traceback
    return sent


async def test_a_body_that_never_came_gets_503() -> None:
    start, body = await cut_off(started=False)
    assert start["status"] == 503
    assert b"this server is stopping" in body["body"]


async def test_an_answer_that_has_begun_just_ends() -> None:
    assert await cut_off(started=True) == []
