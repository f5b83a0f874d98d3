"""Before a node starts anything: can the head be reached, and does it take this node's key? Called by serve.py; blocks."""

import contextlib
import socket
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from meshlm.protocol.config import MeshConfig
from meshlm.runtime import keys, tcp
from meshlm.supervisor.display import StartDisplay
from meshlm.supervisor.errors import StartError

SAY_AGAIN_S = 10.0
REFUSALS, REFUSED_S = 3, 2.0  # so many failed handshakes, over so long: not a connection that broke by chance
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


def wait_for_head(config: MeshConfig, display: StartDisplay) -> None:
    """Return when the head has taken this node's key. StartError when it does not, or cannot be reached in time."""
    assert config.node is not None
    node, network = config.node, config.network
    settings = tcp.Tcp(node.address, keys.load(network.key_file), network)
    until = time.monotonic() + config.run.startup_timeout
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        settings.prepare(sock)
        monitor = sock.get_monitor_socket()
        try:
            sock.connect(tcp.join(*tcp.parse(node.head)))
            _wait(monitor, node.head, network.key_file, until, display)
        finally:
            sock.disable_monitor()
            monitor.close(0)


def _wait(monitor: "zmq.Socket[bytes]", head: str, key_file: str, until: float, display: StartDisplay) -> None:
    began = time.monotonic()
    say_at, refusals, first = began + 1.0, 0, 0.0
    while (now := time.monotonic()) < until:
        if now >= say_at:
            display.line(f"waiting for the head {head}: it cannot be reached yet")
            say_at = now + SAY_AGAIN_S
        if not monitor.poll(timeout=int(1000 * min(1.0, until - now)) + 1):
            continue
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return
        if event in _REFUSED and _is_there(head):
            first = first or now
            refusals += 1
            if refusals >= REFUSALS and now - first >= REFUSED_S:
                raise StartError(f"--join {head}: what listens there does not take the key of --key-file {key_file}")
    raise StartError(f"--join {head}: the head could not be reached within {until - began:.0f} s (--startup-timeout)")


def _is_there(head: str) -> bool:
    """Whether a ZeroMQ socket greets there: a load balancer in front of a head that is not up closes the connection too."""
    greeting = b""
    with contextlib.suppress(OSError), socket.create_connection(tcp.parse(head), timeout=1.0) as probe:
        while len(greeting) < 10 and (data := probe.recv(10 - len(greeting))):
            greeting += data
    return len(greeting) == 10 and greeting[0] == 0xFF and greeting[9] == 0x7F
