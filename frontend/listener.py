"""The port of a frontend by HTTP, and the files that may change while it serves: API keys, certificates. Owned by io.py.

The port by gRPC (grpc/listener.py) watches the same files.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from meshlm.frontend.http import server as http
from meshlm.frontend.http.connection import Timeouts
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.routes.application import Application
from meshlm.protocol.config import ServerConfig
from meshlm.runtime import tls
from meshlm.runtime.api_keys import ApiKeys, KeyFileError
from meshlm.runtime.errors import ProcessFatal

LOOK_S = 1.0

_log = structlog.get_logger()


class Watched(NamedTuple):
    """What is read again when one of these files has changed."""

    what: str
    paths: tuple[str, ...]
    read_again: Callable[[], None]


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """The context of a frontend's port. ProcessFatal: the files were good when the mesh started, and are not any more."""
    try:
        return tls.make_context(server)
    except tls.TLSError as error:
        raise ProcessFatal(str(error)) from None


def watched_files(server: ServerConfig, keys: ApiKeys, reload_tls: Callable[[], None] | None) -> list[Watched]:
    """The files that a frontend with these settings watches."""
    if keys.problem:  # the file was good when the mesh started; it is looked at again when it changes
        _log.error("API keys not read; none of the file holds", reason=keys.problem)
    found = [Watched("API keys", (server.api_key_file,), keys.read_again)] if server.api_key_file else []
    if server.enable_ssl_refresh and reload_tls is not None:
        found.append(Watched("certificates", tls.files(server), reload_tls))
    return found


async def watch_files(files: list[Watched]) -> None:
    """Look at all once a second, for ever. What cannot be read is said once, and what held before goes on to hold."""
    stamps = [_stamp(one.paths) for one in files]
    while files:
        await asyncio.sleep(LOOK_S)
        for number, one in enumerate(files):
            if (now := _stamp(one.paths)) == stamps[number]:
                continue
            stamps[number] = now
            try:
                one.read_again()
            except (KeyFileError, tls.TLSError) as error:
                _log.warning("files not read again; those before hold", what=one.what, reason=str(error))
            else:
                _log.info("files read again", what=one.what)


def _stamp(paths: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Changes when one of the files does, or is replaced or taken away."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return found


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
        context = tls_context(server)
        self._server = http.make_server(routes.app(), timeouts, routes.unsent, context)
        reload_tls = partial(tls.load, context, server) if context is not None else None
        files = watched_files(server, routes.keys, reload_tls)
        self._watching = asyncio.get_running_loop().create_task(watch_files(files))
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
