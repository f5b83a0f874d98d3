"""The connector between meshes: pages of a prompt that another mesh has computed, by the ticket in kv_transfer_params.

One record of names serves every way in which requests come (params that a proxy passes on, request ids that carry addresses):

    ticket        what the pages are called, hex
    remote_host   where the mesh is that computes the prompt ...
    remote_ports  ... and the ports of its workers, by their place in a rank; or remote_port, from which they count
    push_host, push_port   whom the prompt's pages are sent to as soon as they are there; without them they wait to be asked for

Pages that were pushed lie in this worker's own server; others are read from that mesh. What cannot be reached, or ends, or has a wrong
sum is not there, and is computed.
"""

import select
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshlm.protocol.remote_pages import TICKET_BYTES, VERSION, Done, Find, Put, Read
from meshlm.workers.kv.connectors import Page
from meshlm.workers.kv.remote.frames import Broken, receive_page, receive_reply, send, send_page
from meshlm.workers.kv.remote.server import PageServer

CONNECT_S = 2.0
TRANSFER_S = 30.0  # between two bytes
WAIT_S = 1.0  # for a ticket that is on its way


class RemoteConnector:
    """`worker`: this one's place in its rank. Connections are kept, one for each mesh that it reads from."""

    def __init__(self, server: PageServer, worker: int, warn: Callable[[str], None] = lambda _: None) -> None:
        self._server, self._worker, self._warn = server, worker, warn
        self._connections: dict[tuple[str, int], socket.socket] = {}

    def find(self, keys: Sequence[bytes], params: Mapping[str, Any]) -> Sequence[bool]:
        """As Connector.find. A ticket that another mesh is still sending is waited for."""
        ticket = _ticket(params)
        pushed = "push_host" in params
        if ticket is None:
            return [False] * len(keys)
        held = self._server.tickets.wait(ticket, WAIT_S if pushed else 0.0)
        if held is not None:
            return [key in held.places for key in keys]
        question = Find(VERSION, self._server.namespace, ticket, b"".join(keys), WAIT_S)
        with self._asking(params) as connection:
            send(connection, question)
            reply = receive_reply(connection)
        if reply.error or len(reply.found) != len(keys):
            raise Broken(reply.error or "an answer of another length")
        return [bool(found) for found in reply.found]

    def load(self, keys: Sequence[bytes], pages: Sequence[Page], params: Mapping[str, Any]) -> Sequence[bool]:
        """As Connector.load."""
        ticket = _ticket(params)
        if ticket is None:
            return [False] * len(keys)
        held = self._server.tickets.find(ticket)
        if held is not None:
            filled = [_copied(place, page) for place, page in zip(held.of(keys), pages, strict=True)]
            self._server.tickets.end(ticket)
            return filled
        with self._asking(params) as connection:
            send(connection, Read(ticket, b"".join(keys)))
            reply = receive_reply(connection)
            if len(reply.found) != len(keys):
                raise Broken("an answer of another length")
            filled = [
                bool(found) and receive_page(connection, page) for found, page in zip(reply.found, pages, strict=True)
            ]
            send(connection, Done(ticket))
            receive_reply(connection)
        return filled

    def save(self, keys: Sequence[bytes], pages: Sequence[Page]) -> None:
        """Nothing: a prompt's pages are left by their ticket alone."""

    def push(self, keys: Sequence[bytes], pages: Sequence[Page], params: Mapping[str, Any]) -> None:
        """Sends pages to whom `params` name. Broken, OSError."""
        ticket = _ticket(params)
        assert ticket is not None
        there = {"remote_host": params["push_host"], "remote_port": params["push_port"]}
        with self._asking(there) as connection:
            send(connection, Put(VERSION, self._server.namespace, ticket, b"".join(keys)))
            if error := receive_reply(connection).error:
                raise Broken(error)
            for page in pages:
                send_page(connection, page)
            receive_reply(connection)

    def close(self) -> None:
        """Nobody calls it any more."""
        for connection in self._connections.values():
            connection.close()

    def _asking(self, params: Mapping[str, Any]) -> "_Asking":
        return _Asking(self._connections, _address(params, self._worker))


class _Asking:
    """One question and its answer over a kept connection, which is made anew where it was lost in between, and closed where the answer
    breaks off."""

    def __init__(self, connections: dict[tuple[str, int], socket.socket], address: tuple[str, int]) -> None:
        self._connections, self._address = connections, address

    def __enter__(self) -> socket.socket:
        kept = self._connections.pop(self._address, None)
        if kept is not None and not _is_closed(kept):
            self._connection = kept
        else:
            if kept is not None:
                kept.close()
            self._connection = socket.create_connection(self._address, CONNECT_S)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.settimeout(TRANSFER_S)
        return self._connection

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._connections[self._address] = self._connection
        else:
            self._connection.close()


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended it meanwhile."""
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable)  # it says nothing unasked


def _ticket(params: Mapping[str, Any]) -> bytes | None:
    """None where the request has none. ValueError where it is no ticket."""
    text = params.get("ticket")
    if text is None:
        return None
    ticket = bytes.fromhex(text)
    if len(ticket) != TICKET_BYTES:
        raise ValueError(f"ticket: {TICKET_BYTES} bytes are expected")
    return ticket


def _address(params: Mapping[str, Any], worker: int) -> tuple[str, int]:
    """Where the worker with this one's place in its rank listens. ValueError where there is none."""
    ports = params.get("remote_ports")
    if ports is None:
        return str(params["remote_host"]), int(params["remote_port"]) + worker
    if worker >= len(ports):
        raise ValueError(f"remote_ports: {len(ports)} workers have the pages, and a rank has more here")
    return str(params["remote_host"]), int(ports[worker])


def _copied(place: "int | Page | None", page: Page) -> bool:
    if place is None or isinstance(place, int):
        return False
    page[:] = place
    return True
