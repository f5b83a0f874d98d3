"""uvicorn, with its connection's transport within reach of the event stream writer.

A chunk through ASGI `send` costs 15 to 20 µs, written straight to the transport about 9 (most of it the system call).
Where the extension is absent (another server, a test client) the writer falls back to plain ASGI.
"""

import asyncio
import contextlib
import re
import socket
import time
from collections import deque
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "meshlm.transport"
MAX_HEADER_BYTES = 64 << 10
FRESH_S = 1.0  # a connection that brought no request yet is not idle for so long

_OFFER = b"upgrade:"
_UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)

Scope = dict[str, Any]


class MeshProtocol(HttpToolsProtocol):
    """Adds the transport to the scope, and three things that uvicorn lacks on httptools: a limit on what comes before a body, requests
    that offer another protocol in passing, and the hang-up told to every request of a pipeline."""

    _head_bytes = _field_bytes = 0
    _in_body = False
    _at_line_start = True
    _held = b""
    _earlier: "list[Any]"

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._earlier = []

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._earlier:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            data = self._without_offer(self._held + data)
        self._head_bytes += len(data)  # back to 0 when a head ends, a body goes on or a message ends
        super().data_received(data)
        if self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("headers too large")

    def _without_offer(self, data: bytes) -> bytes:
        """A head, or a part of one, whose Upgrade field has another name: the request counts, the offer does not. What may be the
        beginning of that field's name waits for the rest."""
        head, gap, body = data.partition(b"\r\n\r\n")
        begin = b"\n" if self._at_line_start else b""
        head = _UPGRADE.sub(b"\nX-Offered:", begin + head)[len(begin) :]
        self._held = b""
        if not gap:
            line = head[head.rfind(b"\n") + 1 :]
            if line and (self._at_line_start or len(line) < len(head)) and _OFFER.startswith(line.lower()):
                self._held, head = line, head[: -len(line)]
            if head:
                self._at_line_start = head.endswith(b"\n")
        return head + gap + body

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._field_bytes = 0
        self.scope["extensions"] = {
            EXTENSION: {"transport": self.transport, "flow": self.flow, "begun": time.monotonic()}
        }

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value) + 4
        if self._field_bytes > MAX_HEADER_BYTES:  # trailers too
            raise ValueError("headers too large")  # httptools reports it, uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body, self._head_bytes = True, 0
        if self.cycle is not None:
            self._earlier = [cycle for cycle in self._earlier if not cycle.response_complete] + [self.cycle]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body, self._at_line_start, self._head_bytes = False, True, 0


class EventWriter:
    """Writes events of one response. `start` first; `write` never blocks; `finish` last."""

    def __init__(self, scope: Scope, send: Any) -> None:
        self._send = send
        extension = scope.get("extensions", {}).get(EXTENSION)
        self._transport: asyncio.Transport | None = extension["transport"] if extension else None
        self._flow: Any = extension["flow"] if extension else None
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._draining = asyncio.Lock()
        self.started = False
        self._is_free = False  # what comes goes out at once: started, nothing waits, nothing drains

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        base = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": base + headers})
        if self._transport is not None:
            await self._send({"type": "http.response.body", "body": b"", "more_body": True})
        self.started = True
        self._is_free = self._transport is not None and not self._waiting

    def write(self, event: bytes) -> None:
        """One or more whole events. What cannot be sent now waits, and goes out in one piece later."""
        if self._is_free and not self._flow.write_paused:
            transport = self._transport
            if not transport.is_closing():  # type: ignore[union-attr]  # uvloop raises for a client that left
                transport.write(b"%x\r\n%b\r\n" % (len(event), event))  # type: ignore[union-attr]
            return
        self._is_free = False
        self._waiting.append(event)
        self._wake.set()

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
                self._waiting.clear()
                if self._transport is None:
                    await asyncio.shield(self._send({"type": "http.response.body", "body": piece, "more_body": True}))
                elif not self._transport.is_closing():
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
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

    def install_signal_handlers(self) -> None:
        """Signals are runtime/process.py's."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


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
            if (
                connection.cycle is not None or loop.time() > fresh_until
            ):  # the first request of a new one is on its way
                connection.shutdown()  # now if it is idle, else after its answer
        await asyncio.sleep(0.02)


def _stop_listening(server: Server, listener: socket.socket) -> None:
    """Connections that the kernel has accepted already are served here: closing the socket would reset them."""
    waiting = listener.dup()
    for one in server.servers:
        one.close()
    loop = asyncio.get_running_loop()
    waiting.setblocking(False)
    with waiting, contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = waiting.accept()
            connection.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(lambda: _protocol(server), connection))
            server.server_state.tasks.add(task)  # type: ignore[arg-type]
            task.add_done_callback(server.server_state.tasks.discard)


def _protocol(server: Server) -> MeshProtocol:
    return MeshProtocol(server.config, server.server_state, server.lifespan.state)


def make_server(app: Any) -> Server:
    config = uvicorn.Config(
        app,
        http=MeshProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,  # for who does not read what ended; the supervisor kills after 5 s
        backlog=4096,
    )
    return Server(config)
