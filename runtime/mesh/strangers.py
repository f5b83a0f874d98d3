"""Names in the log, seldom, who knocks at a tcp socket of the mesh with another key. Owned by remote.py.

Such a connection ends in its handshake, before tcp.py's Doorman is asked and before any frame: what it says is sealed for somebody
else's key. libzmq tells of it on a monitor socket alone. Connections that say nothing, or nothing of ZeroMQ's (probes of ports,
load balancers), are not worth a line.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from meshlm.runtime.process.logs import Limited

_SEEN = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has the key of another mesh (--key-file)",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it speaks ZeroMQ without CURVE",
}


class _Seldom(Limited):
    """A node with a wrong key tries some times a second."""

    BURST = 1
    PER_SECOND = 1 / 60


class Strangers:
    """The monitor of one bound socket."""

    def __init__(self, log: Any) -> None:
        self._logs = {error: _Seldom(log) for error in _REASONS}
        self._addresses: dict[int, str] = {}  # by file descriptor, of connections that were there when we looked
        self._failed = 0  # why the connection failed that ends next
        self._monitor: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, sock: "zmq.Socket[bytes]", loop: asyncio.AbstractEventLoop) -> None:
        """Watches `sock` from now on; called before it is bound."""
        self._monitor, self._loop = sock.get_monitor_socket(_SEEN), loop
        loop.add_reader(self._monitor.FD, self._read)
        loop.call_soon(self._read)

    def _read(self) -> None:
        """Reads all events that are there; the FD is edge-triggered."""
        if self._monitor is None:
            return
        events: list[tuple[int, int]] = []
        try:
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                events.append((event["event"], event["value"]))
        except zmq.Again:
            pass
        ended = {value for kind, value in events if kind == zmq.EVENT_DISCONNECTED}
        self.take(events, lambda descriptor: "" if descriptor in ended else _address_of(descriptor))

    def take(self, events: list[tuple[int, int]], address_of: Callable[[int], str]) -> None:
        """Kinds and values. What fails is the connection that ends next, maybe in the next call: one thread of ZeroMQ's does both."""
        for kind, value in events:
            if kind == zmq.EVENT_ACCEPTED:
                self._addresses[value] = address_of(value)
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._failed = value
            else:
                address = self._addresses.pop(value, "")
                if self._failed in _REASONS:
                    self._say(self._failed, address)
                self._failed = 0

    def _say(self, error: int, address: str) -> None:
        where = {"address": address} if address else {}  # gone before we looked
        self._logs[error].warning("connection refused", **where, reason=_REASONS[error])

    def close(self) -> None:
        if self._monitor is not None and self._loop is not None:
            self._loop.remove_reader(self._monitor.FD)
            self._monitor.close(0)
            self._monitor = None


def _address_of(descriptor: int) -> str:
    """The other end of a connection of libzmq's; "" when it is gone."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return ""
    try:
        return str(connection.getpeername()[0]) if connection.family in (socket.AF_INET, socket.AF_INET6) else ""
    except OSError:
        return ""
    finally:
        connection.detach()  # it stays libzmq's
