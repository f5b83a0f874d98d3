"""uvicorn, with its connection's transport within reach of the event stream writer.

A chunk through ASGI `send` costs 15 to 20 µs, written straight to the transport about 9 (most of it the system call).
Where the extension is absent (another server, a test client) the writer falls back to plain ASGI.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections import deque
from functools import partial
from typing import Any

import uvicorn

from meshlm.frontend.http.connection import EXTENSION, MeshProtocol, Timeouts, cut_off

FRESH_S = 1.0  # a connection that brought no request yet is not idle for so long

EVENTS = "text/event-stream; charset=utf-8"

Scope = dict[str, Any]


class ByteBudget:
    """Bytes that many requests may hold together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.num_bytes = limit, 0

    def take(self, count: int) -> bool:
        """Takes `count` bytes more from the budget; gives False, and takes none, when that is too many."""
        if self.num_bytes + count > self.limit:
            return False
        self.num_bytes += count
        return True

    def give(self, count: int) -> None:
        self.num_bytes -= count


class EventWriter:
    """Writes events of one response. `start` first; `write` never blocks; `finish` or `release` last.

    What the client does not take waits here. A client that leaves more than FREE_BYTES needs room in a budget that all clients share,
    of which it may have a quarter; without it the client is cut off, and its request ends as with any client that leaves."""

    FREE_BYTES = 1 << 20

    def __init__(self, scope: Scope, send: Any, unsent: ByteBudget, media_type: str = EVENTS) -> None:
        self._send, self._media_type = send, media_type.encode()
        extension = scope.get("extensions", {}).get(EXTENSION)
        self._transport: asyncio.Transport | None = extension["transport"] if extension else None
        self._flow: Any = extension["flow"] if extension else None
        self._cycle: Any = extension["cycle"] if extension else None
        self._chunked = scope.get("http_version") != "1.0"  # else the end of the connection is the end of the answer
        self._waiting: deque[bytes] = deque()
        self._num_waiting = self._num_taken = 0
        self._unsent = unsent
        self._wake = asyncio.Event()
        self._draining = asyncio.Lock()
        self.started = False
        self._is_free = False  # what comes goes out at once: started, nothing waits, nothing drains

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        base = [(b"content-type", self._media_type), (b"cache-control", b"no-cache")]
        if self._cycle is not None and not self._chunked:
            self._cycle.chunked_encoding = False
        await self._send({"type": "http.response.start", "status": 200, "headers": base + headers})
        if self._transport is not None:
            await self._send({"type": "http.response.body", "body": b"", "more_body": True})
        self.started = True
        self._is_free = self._transport is not None and not self._waiting

    def write(self, event: bytes) -> None:
        """One or more whole events. What cannot be sent now waits, and goes out in one piece later."""
        transport = self._transport
        if self._is_free and not self._flow.write_paused:
            if not transport.is_closing():  # type: ignore[union-attr]  # uvloop raises for a client that left
                transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)  # type: ignore[union-attr]
            return
        if transport is not None and transport.is_closing():
            return  # its request is told soon
        self._is_free = False
        self._waiting.append(event)
        self._num_waiting += len(event)
        self._wake.set()
        if transport is not None and self._num_waiting > self.FREE_BYTES:
            if self._num_waiting <= self._unsent.limit // 4 and self._unsent.take(len(event)):
                self._num_taken += len(event)
            else:
                self.release()
                cut_off(transport, "what it has not taken of its answer has no room (--max-unsent-bytes)")

    def release(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()
        self._unsent.give(self._num_taken)
        self._num_waiting = self._num_taken = 0

    async def pump(self) -> None:
        """Send what waits, for ever; runs beside the request and is cancelled at its end."""
        while True:
            await self._wake.wait()
            await self.drain()

    async def drain(self) -> None:
        """Send what waits now, in order. A piece is taken only once it can go out, so that a cancellation loses nothing."""
        async with self._draining:
            self._wake.clear()
            while self._waiting:
                if self._flow is not None:
                    await self._flow.drain()
                piece = b"".join(self._waiting)
                self.release()
                if self._transport is None:
                    await asyncio.shield(self._send({"type": "http.response.body", "body": piece, "more_body": True}))
                elif not self._transport.is_closing():
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
            self._is_free = self.started and self._transport is not None

    async def finish(self) -> None:
        await self.drain()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that several frontends share (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    sock.set_inheritable(False)
    return sock


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the process has those."""

    def __init__(self, config: uvicorn.Config, timeouts: Timeouts, unsent: ByteBudget) -> None:
        super().__init__(config)
        self.timeouts, self._unsent = timeouts, unsent

    def install_signal_handlers(self) -> None:
        """Signals are runtime/process/process.py's."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; the connections are looked at once."""
        if counter % 10 == 0:
            now = time.monotonic()
            connections = [one for one in self.server_state.connections if isinstance(one, MeshProtocol)]
            for connection in connections:
                connection.check(now, self.timeouts)
            self._cut_off(connections)
        return await super().on_tick(counter)

    def _cut_off(self, connections: list[MeshProtocol]) -> None:
        """The clients that leave the most of what was written to them, as long as all together leave too much."""
        excess = sum(connection.unsent for connection in connections) - self._unsent.limit
        if excess > 0:
            for connection in sorted(connections, key=lambda connection: -connection.unsent):
                if excess > 0:
                    excess -= connection.unsent
                    cut_off(connection.transport, "it leaves the most of what all clients leave (--max-unsent-bytes)")


async def hand_over(server: Server, listener: socket.socket | None, limit_s: float) -> None:
    """Leave new connections to the other listeners of the port; serve those that are open until they are idle, `limit_s` at most."""
    if listener is not None:
        _stop_listening(server, listener)
    loop = asyncio.get_running_loop()
    fresh_until, end = loop.time() + FRESH_S, loop.time() + limit_s
    state = server.server_state
    while state.connections and loop.time() < end:
        for connection in list(state.connections):
            assert isinstance(connection, MeshProtocol)
            if connection.cycle is not None or loop.time() > fresh_until:  # a new one's first request is on its way
                connection.shutdown()  # now if it is idle, else after its answer
        await asyncio.sleep(0.02)


def _stop_listening(server: Server, listener: socket.socket) -> None:
    """Connections that the kernel has accepted already are served here: closing the socket would reset them."""
    waiting = listener.dup()
    for one in server.servers:
        one.close()
    loop = asyncio.get_running_loop()
    protocol = partial(MeshProtocol, server.config, server.server_state, server.lifespan.state)
    waiting.setblocking(False)
    with waiting, contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = waiting.accept()
            connection.setblocking(False)
            taking = loop.connect_accepted_socket(protocol, connection, ssl=server.config.ssl)
            task = loop.create_task(taking)
            server.server_state.tasks.add(task)  # type: ignore[arg-type]
            task.add_done_callback(server.server_state.tasks.discard)


def make_server(app: Any, timeouts: Timeouts, unsent: ByteBudget, context: ssl.SSLContext | None = None) -> Server:
    config = uvicorn.Config(
        app,
        http=MeshProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,  # for who does not read what ended; the supervisor kills after 5 s
        backlog=4096,
    )
    config.load()
    config.ssl = context
    return Server(config, timeouts, unsent)
