"""The connector between meshes: pages of a prompt that another mesh has computed, by the ticket in kv_transfer_params.

One record of names serves every way in which requests come (params that a proxy passes on, request ids that carry addresses):

    ticket        what the pages are called, hex
    remote_host   where the mesh is that computes the prompt ...
    remote_ports  ... and the ports of its workers, by their place in a rank; or remote_port, from which they count
    push_host, push_port   whom the prompt's pages are sent to as soon as they are there; without them they wait to be asked for

Pages that were pushed lie in this worker's own server; others are read from that mesh. What cannot be reached, or ends, or has a wrong
sum is not there, and is computed. Where that mesh has another -tp, several of its workers have heads of this one's pages, or one of
them has those of several (slices.py).
"""

import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshlm.protocol.remote_pages import TICKET_BYTES, VERSION, Done, Find, Hello, Put, Read, Reply
from meshlm.workers.kv.connectors import Page
from meshlm.workers.kv.remote.frames import Broken, receive_page, receive_reply, send, send_page
from meshlm.workers.kv.remote.server import PageServer

CONNECT_S = 2.0
TRANSFER_S = 30.0  # between two bytes
WAIT_S = 1.0  # for a ticket that is on its way


class RemoteConnector:
    """Connections are kept, one for each worker that it reads from."""

    def __init__(self, server: PageServer) -> None:
        self._server, self._shape = server, server.shape
        self._connections: dict[tuple[str, int], socket.socket] = {}
        self._tp_sizes: dict[tuple[str, int], int] = {}  # of meshes, by the address of their first workers

    def find(self, keys: Sequence[bytes], params: Mapping[str, Any]) -> Sequence[bool]:
        """As Connector.find. A ticket that another mesh is still sending is waited for."""
        ticket = _ticket(params)
        pushed = "push_host" in params
        if ticket is None:
            return [False] * len(keys)
        held = self._server.tickets.wait(ticket, WAIT_S if pushed else 0.0)
        if held is not None:
            return [key in held.places for key in keys]
        question, all_have = Find(VERSION, self._server.namespace, ticket, b"".join(keys), WAIT_S), [True] * len(keys)
        for holder in self._shape.taken_from(self._tp_size(params)):
            with self._asking(params, holder) as connection:
                send(connection, question)
                found = _found(receive_reply(connection), keys)
            all_have = [one and other for one, other in zip(all_have, found, strict=True)]
        return all_have

    def load(self, keys: Sequence[bytes], pages: Sequence[Page], params: Mapping[str, Any]) -> Sequence[bool]:
        """As Connector.load."""
        ticket = _ticket(params)
        if ticket is None:
            return [False] * len(keys)
        held = self._server.tickets.find(ticket)
        if held is not None:
            return [_copied(place, page) for place, page in zip(held.of(keys), pages, strict=True)]
        shard, filled, tp_size = self._shape.shard, [True] * len(keys), self._tp_size(params)
        for holder, heads in self._shape.taken_from(tp_size).items():
            with self._asking(params, holder) as connection:
                send(connection, Read(ticket, b"".join(keys), shard.tp_size, shard.tp_rank))
                for nth, there in enumerate(_found(receive_reply(connection), keys)):
                    filled[nth] &= there and self._receive(connection, pages[nth], heads)
        return filled

    def _receive(self, connection: socket.socket, page: Page, heads: range) -> bool:
        """The next page's heads, put into it; whether their sum is right."""
        if heads == self._shape.heads:
            return receive_page(connection, page)
        piece = np.empty(self._shape.piece_bytes(heads), np.uint8)
        is_right = receive_page(connection, piece)
        self._shape.fill(page, heads, piece)
        return is_right

    def end(self, params: Mapping[str, Any]) -> None:
        """All that was wanted of these pages is loaded."""
        ticket = _ticket(params)
        if ticket is None or self._server.tickets.end(ticket) is not None:
            return
        shard = self._shape.shard
        for holder in self._shape.taken_from(self._tp_size(params)):
            with self._asking(params, holder) as connection:
                send(connection, Done(ticket, shard.tp_size, shard.tp_rank))
                receive_reply(connection)

    def save(self, keys: Sequence[bytes], pages: Sequence[Page]) -> None:
        """Nothing: a prompt's pages are left by their ticket alone."""

    def push(self, keys: Sequence[bytes], pages: Sequence[Page], params: Mapping[str, Any]) -> None:
        """Sends pages to whom `params` name. Broken, OSError."""
        ticket, shard = _ticket(params), self._shape.shard
        assert ticket is not None
        there = {"remote_host": params["push_host"], "remote_port": params["push_port"]}
        put = Put(VERSION, self._server.namespace, ticket, b"".join(keys), shard.tp_size, shard.tp_rank)
        for reader, heads in self._shape.given_to(self._tp_size(there)).items():
            with self._asking(there, reader) as connection:
                send(connection, put)
                if error := receive_reply(connection).error:
                    raise Broken(error)
                for page in pages:
                    send_page(connection, self._shape.cut(page, heads))
                receive_reply(connection)

    def close(self) -> None:
        """Nobody calls it any more."""
        for connection in self._connections.values():
            connection.close()

    def _tp_size(self, params: Mapping[str, Any]) -> int:
        """The tensor-parallel ranks of that mesh. Broken where pages cannot go between it and this one."""
        address = _address(params, 0)
        if (known := self._tp_sizes.get(address)) is not None:
            return known
        with _Asking(self._connections, address) as connection:
            send(connection, Hello(VERSION))
            reply = receive_reply(connection)
        if why := reply.error or self._shape.why_not(reply.tp_size, reply.pp_size):
            raise Broken(why)
        self._tp_sizes[address] = reply.tp_size
        return reply.tp_size

    @contextmanager
    def _asking(self, params: Mapping[str, Any], tp_rank: int) -> Iterator[socket.socket]:
        """A connection with the worker of that mesh that has this worker's layers and that tensor-parallel rank."""
        first = _address(params, 0)
        place = self._shape.shard.pp_rank * self._tp_sizes[first] + tp_rank
        try:
            with _Asking(self._connections, _address(params, place)) as connection:
                yield connection
        except (Broken, OSError):
            self._tp_sizes.pop(first, None)  # another mesh may listen there now
            raise


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


def _found(reply: Reply, keys: Sequence[bytes]) -> list[bool]:
    """By key. Broken."""
    if reply.error or len(reply.found) != len(keys):
        raise Broken(reply.error or "an answer of another length")
    return [bool(found) for found in reply.found]


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
        raise ValueError(f"remote_ports: {len(ports)} workers have the pages, and worker {worker} is asked for")
    return str(params["remote_host"]), int(ports[worker])


def _copied(place: "int | Page | None", page: Page) -> bool:
    if place is None or isinstance(place, int):
        return False
    page[:] = place
    return True
