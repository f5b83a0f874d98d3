"""The port of a frontend: the HTTP server with its routes. Owned by io.py."""

import asyncio
import socket
from functools import partial
from typing import Protocol

from meshlm.frontend.http import server as http
from meshlm.frontend.http import watched_files
from meshlm.frontend.http.connection import Timeouts
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.routes.application import Application
from meshlm.runtime import tls


class Listener(Protocol):
    """The open port of a frontend, by HTTP or gRPC (grpc/listener.py). `serving` ends when it does."""

    serving: "asyncio.Task[None] | None"

    async def start(self) -> None: ...
    async def hand_over(self, limit_s: float) -> None: ...
    async def stop(self) -> None: ...


class HttpListener:
    """Serves until `stop`. OSError when the port cannot be had."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._server: http.Server | None = None
        self._socket: socket.socket | None = None
        self._routes: Application | None = None
        self.serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        server = self._backend.config.server
        self._socket = http.listen(server.address, server.port)
        timeouts = Timeouts(server.http_header_timeout, server.http_body_timeout, server.http_send_timeout)
        routes = self._routes = Application(self._backend)
        context = watched_files.tls_context(server)
        self._server = http.make_server(routes.app(), timeouts, routes.unsent, context)
        reload_tls = partial(tls.load, context, server) if context is not None else None
        files = watched_files.of_server(server, routes.keys, reload_tls)
        self._watching = asyncio.get_running_loop().create_task(watched_files.watch(files))
        self.serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        routes.responses.start()

    async def hand_over(self, limit_s: float) -> None:
        """Leaves new connections to the other listeners of the port; waits for the open ones, `limit_s` at most."""
        if self._server is not None:
            await http.hand_over(self._server, self._socket, limit_s)

    async def stop(self) -> None:
        """Open requests may still be read for a moment."""
        if self._watching is not None:
            self._watching.cancel()
        if self._routes is not None:
            await self._routes.responses.stop()
        if self._server is not None and self.serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self.serving}, timeout=6)
