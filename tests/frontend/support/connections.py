"""A connection of the HTTP server with a transport and an application of the test's own: no sockets."""

import asyncio
import time
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from meshlm.frontend.http.connection import MeshProtocol, Timeouts

LIMITS = Timeouts(header=5.0, body=7.0, send=9.0)
Request = tuple[str, str, list[tuple[bytes, bytes]], bytes]


class Transport(asyncio.Transport):
    """Keeps what is written; the client takes all of it unless `unsent` says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.unsent = b"", 0
        self.closing = self.aborted = self.ended = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class App:
    """Answers each request with its number, once its body is there and `go` is set."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.go = asyncio.Event()
        self.go.set()
        self.num_begun = self.num_gone = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_gone += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.requests.append((scope["method"], scope["path"], scope["headers"], body))
        await self.go.wait()
        text = b"%d" % len(self.requests)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
        await send({"type": "http.response.body", "body": text})


class Clock:
    """In the place of the module time."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Connection:
    """One connection of an app."""

    def __init__(self, app: Any = None) -> None:
        self.app = app or App()
        config = uvicorn.Config(self.app, http=MeshProtocol, lifespan="off", log_config=None, access_log=False)
        self.state = ServerState()
        self.transport = Transport()
        self.protocol = MeshProtocol(config, self.state, {})
        self.protocol.connection_made(self.transport)

    async def feed(self, *parts: bytes) -> "Connection":
        for part in parts:
            self.protocol.data_received(part)
            await self.settle()
        return self

    async def settle(self) -> None:
        """Until every request waits or is answered, and none is parsed any more."""
        for _ in range(2000):
            before = (self.app.num_begun, len(self.app.requests), len(self.transport.written))
            for _ in range(6):
                await asyncio.sleep(0)
            if before == (self.app.num_begun, len(self.app.requests), len(self.transport.written)):
                return

    async def answered(self, count: int) -> None:
        """Until so many requests are, within a limit."""
        async with asyncio.timeout(30):
            while self.transport.written.count(b"HTTP/1.1 200") < count:
                for _ in range(count):
                    await asyncio.sleep(0)

    def check(self, after_s: float) -> None:
        self.protocol.check(time.monotonic() + after_s, LIMITS)

    async def end(self) -> None:
        self.protocol.connection_lost(None)
        tasks = list(self.state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
