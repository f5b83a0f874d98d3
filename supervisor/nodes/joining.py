"""Before a node starts anything: can the head be found and reached, does it take this node's key? serve.py calls it; it blocks."""

import contextlib
import socket
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.mesh import keys, tcp
from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.errors import StartError

SAY_AGAIN_S, NAME_AGAIN_S = 10.0, 0.5
REFUSALS, REFUSED_S = 3, 2.0  # so many failed handshakes, over so long: not a connection that broke by chance
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


def wait_for_name(join: str, until: float, display: StartDisplay) -> None:
    """Return when the head's name leads somewhere: where hosts start in any order, a name may come with its host. StartError."""
    host, port = tcp.parse(join)
    say_at = time.monotonic() + 1.0
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now >= until:
            raise StartError(f"--join {join}: {host}: {reason}, until --startup-timeout")
        if now >= say_at:
            display.line(f"waiting for the head {join}: {host}: {reason}")
            say_at = now + SAY_AGAIN_S
        time.sleep(min(NAME_AGAIN_S, until - now))


def wait_for_head(config: MeshConfig, until: float, display: StartDisplay) -> None:
    """Return when the head has taken this node's key. StartError when it does not, or cannot be reached in time."""
    assert config.node is not None
    node, network = config.node, config.network
    settings = tcp.Tcp(node.address, keys.load(network.key_file), network)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        settings.prepare(sock)
        monitor = sock.get_monitor_socket()
        try:
            sock.connect(tcp.join(*tcp.parse(node.head)))
            if not _taken(monitor, node.head, network.key_file, until, display):
                limit = f"{config.run.startup_timeout:.0f} s (--startup-timeout)"
                raise StartError(f"--join {node.head}: the head could not be reached within {limit}")
        finally:
            sock.disable_monitor()
            monitor.close(0)


def _taken(monitor: "zmq.Socket[bytes]", head: str, key_file: str, until: float, display: StartDisplay) -> bool:
    """Whether the head took the key in time."""
    say_at, refusals, first = time.monotonic() + 1.0, 0, 0.0
    while (now := time.monotonic()) < until:
        if now >= say_at:
            display.line(f"waiting for the head {head}: it cannot be reached yet")
            say_at = now + SAY_AGAIN_S
        if not monitor.poll(timeout=int(1000 * min(1.0, until - now)) + 1):
            continue
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return True
        if event in _REFUSED and _is_there(head):
            first = first or now
            refusals += 1
            if refusals >= REFUSALS and now - first >= REFUSED_S:
                raise StartError(f"--join {head}: what listens there does not take the key of --key-file {key_file}")
    return False


def _is_there(head: str) -> bool:
    """Whether a ZeroMQ socket greets there: a load balancer in front of a head that is not up closes the connection too."""
    greeting = b""
    with contextlib.suppress(OSError), socket.create_connection(tcp.parse(head), timeout=1.0) as probe:
        while len(greeting) < 10 and (data := probe.recv(10 - len(greeting))):
            greeting += data
    return len(greeting) == 10 and greeting[0] == 0xFF and greeting[9] == 0x7F
