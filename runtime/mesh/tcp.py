"""TCP sockets between nodes: addresses, CURVE, who may connect, how soon a dead connection is noticed.

Used by mesh.py for peers of other nodes, and by `meshlm serve --headless` to try the head's address. There is no tcp socket without
CURVE: whoever cannot prove that it has the mesh's key sends nothing that a process of the mesh would read.
"""

import asyncio
import random
from typing import Any

import zmq
from zmq.utils import z85

from meshlm.protocol.config import NetworkConfig
from meshlm.runtime.mesh.keys import Keys
from meshlm.runtime.process.logs import Limited

DOMAIN = b"meshlm"
_ZAP = "inproc://zeromq.zap.01"
RECONNECT_MS, MAX_RECONNECT_MS = 20, 500
CONNECT_MS = 1000  # a connection attempt into a cut link is given up, and the next one made
HANDSHAKE_MS = 5000


class AddressError(ValueError):
    """The text is no address of the form tcp://HOST:PORT."""


def parse(endpoint: str) -> tuple[str, int]:
    """'tcp://10.0.0.1:5600' or 'tcp://[fd00::1]:5600' -> host and port. AddressError."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if scheme != "tcp" or not host or host == "*" or not port.isascii() or not port.isdecimal():
        raise AddressError(f"{endpoint!r} is not tcp://HOST:PORT")
    if not 0 < int(port) < 65536:
        raise AddressError(f"{endpoint!r}: ports are 1 to 65535")
    return host, int(port)


def join(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parse_range(text: str) -> tuple[int, int]:
    """'5700-5800' -> (5700, 5800). AddressError."""
    first, dash, last = text.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536:
        return int(first), int(last)
    raise AddressError(f"{text!r} is not FIRST-LAST, two ports")


class Tcp:
    """The settings of one process's tcp sockets. `host` is the numeric address of this node's private interface."""

    def __init__(self, host: str, keys: Keys, config: NetworkConfig) -> None:
        self._host, self._keys, self._config = host, keys, config

    def bind(self, sock: "zmq.Socket[bytes]", port: int = 0) -> str:
        """Bind an inbox to this port, or to a free one (of --mesh-port-range). Its address. zmq.ZMQError."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        sock.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._both_ends(sock)
        if port or not self._config.mesh_port_range:
            sock.bind(join(self._host, port or "*"))
        else:
            self._bind_in_range(sock)
        port = int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return join(self._host, port)

    def _bind_in_range(self, sock: "zmq.Socket[bytes]") -> None:
        first, last = parse_range(self._config.mesh_port_range)
        for port in random.sample(range(first, last + 1), last + 1 - first):
            try:
                sock.bind(join(self._host, port))
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
        raise zmq.ZMQError(zmq.EADDRINUSE)

    def prepare(self, sock: "zmq.Socket[bytes]") -> None:
        """Prepares an outgoing socket before it connects."""
        sock.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        sock.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        sock.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._both_ends(sock)

    def _both_ends(self, sock: "zmq.Socket[bytes]") -> None:
        """A connection over a cut link is ended; TCP by itself would try for minutes, ever less often."""
        timeout_ms = max(1, int(1000 * self._config.peer_timeout))
        sock.setsockopt(zmq.IPV6, int(":" in self._host))
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        sock.setsockopt(zmq.HEARTBEAT_IVL, max(1, timeout_ms // 3))
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        sock.setsockopt(zmq.HEARTBEAT_TTL, max(100, timeout_ms))


class Doorman:
    """Answers libzmq's question who may connect (ZAP, RFC 27): a holder of one of the keys on the list, nobody else."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: frozenset[bytes], log: Any) -> None:
        self._allowed = frozenset(z85.decode(key) for key in allowed)
        self._log = Limited(log)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._socket.FD, self._read)
        loop.call_soon(self._read)

    def register(self, poller: zmq.Poller) -> None:
        """Have a thread without a loop wait for questions too; it calls `answer_all` then."""
        poller.register(self._socket, zmq.POLLIN)

    def _read(self) -> None:
        if self._loop is not None:
            self.answer_all()

    def answer_all(self) -> None:
        """Answers all questions that are there; the FD is edge-triggered, and an answer swallows its edge."""
        while True:
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(question))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request, domain, address, _, mechanism, *credentials = question
        welcome = domain == DOMAIN and mechanism == b"CURVE" and credentials[:1] and credentials[0] in self._allowed
        if welcome:
            return [version, request, b"200", b"OK", b"member", b""]
        self._log.warning("connection refused", address=address.decode("ascii", "replace"), reason="its key is unknown")
        return [version, request, b"400", b"this key is not on the list", b"", b""]

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
            self._loop = None
        self._socket.close(0)
