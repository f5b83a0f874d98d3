"""The server's look at its connections, once a second."""

import asyncio
import time

from connections import LIMITS, App, Transport
from uvicorn.server import ServerState

from meshlm.frontend.http.connection import MeshProtocol
from meshlm.frontend.http.server import ByteBudget, Server, make_server


def connected(server: Server, unsent: int) -> Transport:
    """A client that has not taken so much of what was written to it."""
    protocol = MeshProtocol(server.config, server.server_state, {})
    transport = Transport()
    transport.unsent = unsent
    protocol.connection_made(transport)
    return transport


def a_server(limit: int) -> Server:
    server = make_server(App(), LIMITS, ByteBudget(limit))
    server.server_state = ServerState()
    return server


async def test_those_who_leave_the_most_are_cut_off_as_long_as_all_leave_too_much() -> None:
    server = a_server(1000)
    transports = [connected(server, unsent) for unsent in (100, 500, 450, 90, 0)]
    await server.on_tick(0)
    assert [transport.aborted for transport in transports] == [False, True, False, False, False]
    transports[1].unsent = 0
    await server.on_tick(10)
    assert sum(transport.aborted for transport in transports) == 1


async def test_each_connection_is_looked_at_once_a_second() -> None:
    server = a_server(1000)
    transport = connected(server, 0)
    (protocol,) = server.server_state.connections
    assert isinstance(protocol, MeshProtocol)
    protocol._waits_since = time.monotonic() - LIMITS.header - 1
    await server.on_tick(5)
    assert not transport.closing
    await server.on_tick(10)
    assert transport.closing
    assert server.server_state.default_headers[0][0] == b"date"
    await asyncio.sleep(0)
