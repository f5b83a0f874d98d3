"""Nonsense at every tcp socket of a mesh of two nodes, with the right key, a wrong one and none, beside a stream that is untouched."""

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from fake_answers import reference
from hosts import PORTS, made_keys, on_rank, states, stream
from serving import Serving
from waiting import free_ports, until

from meshlm.protocol.wire.channels import MAX_FRAME_BYTES
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.frames import Header, Kind, pack
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.protocol.wire.session import Hello
from meshlm.runtime.mesh.keys import Keys, load

pytestmark = pytest.mark.mesh
LIMIT_S = 30


class Mesh:
    """A head with rank 0 and a node with rank 1."""

    def __init__(self, folder: Path) -> None:
        self.key_file = made_keys(folder / "key")
        self.keys = load(self.key_file)
        address = f"tcp://127.0.0.1:{free_ports(PORTS, '127.0.0.1')}"
        flags = ("--device", "fake", "-dp", "2", "--key-file", self.key_file, "--data-parallel-size-local", "1")
        self.head = Serving(*flags, "--listen", address)
        self.node = Serving(*flags, "--headless", "--join", address, "--data-parallel-start-rank", "1")

    def sockets(self) -> dict[Identity, int]:
        """The tcp port of every process that has one."""
        found: dict[Identity, int] = {}
        for row in self.head.status()["processes"] + self.node.status()["processes"]:
            for connection in psutil.Process(row["pid"]).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port != self.head.port:
                    found[Identity(Role(row["role"]), row["index"])] = connection.laddr.port
        return found

    def pids(self) -> set[int]:
        return {row["pid"] for row in self.head.status()["processes"] + self.node.status()["processes"]}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    made = Mesh(tmp_path_factory.mktemp("keys"))
    try:
        made.head.wait_for("ready: http")
        made.node.wait_for("ready: this node serves")
        until(lambda: states(made.head).get("scheduler/1") == "ready")
        yield made
    finally:
        made.head.stop()
        made.node.stop()


@pytest.fixture
def unharmed(mesh: Mesh) -> Iterator[None]:
    """A stream beside the test has its tokens, and all processes are the same afterwards."""
    before = mesh.pids()
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(stream, mesh.head, [500 + number], 200) for number in range(2)]
        yield
        for number, answer in enumerate(beside):
            assert answer.result(timeout=LIMIT_S) == reference([500 + number], 200)
    for rank in (0, 1):
        on_rank(mesh.head, rank)
    assert mesh.pids() == before


def push(
    context: "zmq.Context[zmq.Socket[bytes]]", port: int, server: bytes, own: Keys | None, *, connect: bool = True
) -> "zmq.Socket[bytes]":
    sock = context.socket(zmq.PUSH)
    sock.setsockopt(zmq.LINGER, 0)
    if own is not None:
        sock.setsockopt(zmq.CURVE_SERVERKEY, server)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    if connect:
        sock.connect(f"tcp://127.0.0.1:{port}")
    return sock


def fuzz(target: Identity, chance: random.Random) -> Iterator[bytes]:
    """Noise, cut frames, and whole ones with wrong fields or bodies."""
    body = msgspec.msgpack.encode(
        Hello("of another version", "ipc://x", "tcp://127.0.0.1:9", "elsewhere", Incarnation(1))
    )
    hello = msgspec.msgpack.encode(Hello(schema_digest(), "ipc://x", "tcp://127.0.0.1:9", "elsewhere", Incarnation(1)))
    for length in (0, 1, 47, 48, 49, 1000, 100_000):
        yield chance.randbytes(length)
    for role in Role:
        for index in (0, 1, 40):
            for kind in Kind:
                sender, life = Identity(role, index), Incarnation(chance.choice([1, 1 << 63]))
                header = Header(kind, sender, target, life, Incarnation(0), chance.randrange(5), 0)
                for content in (b"", chance.randbytes(60), body, hello[:-5]):
                    yield pack(header, content)
                yield pack(header._replace(receiver=Identity(target.role, 77)), hello)


def test_who_listens(mesh: Mesh) -> None:
    """No frontend, store or media process, which a mesh of several nodes has none of; everything on the private interface alone."""
    ports = mesh.sockets()
    assert {identity.role for identity in ports} == set(Role) - {Role.FRONTEND, Role.STORE, Role.MEDIA}
    for row in mesh.head.status()["processes"]:
        for connection in psutil.Process(row["pid"]).net_connections(kind="tcp"):
            assert connection.laddr.ip == "127.0.0.1"


@pytest.mark.usefixtures("unharmed")
def test_frames_of_a_holder_of_the_key(mesh: Mesh) -> None:
    with zmq.Context() as context:
        for target, port in mesh.sockets().items():
            with push(context, port, mesh.keys.public, mesh.keys) as sock:
                sock.setsockopt(zmq.LINGER, 1000 * LIMIT_S)
                for frame in fuzz(target, random.Random(str(target))):
                    sock.send(frame)
    for server, names in (
        (mesh.head, ("coordinator/0", "detokenizer/0", "scheduler/0")),
        (mesh.node, ("scheduler/1",)),
    ):
        for name in names:
            until(lambda: any("frame dropped" in line and f"process={name}" in line for line in list(server.lines)))  # noqa: B023


@pytest.mark.usefixtures("unharmed")
def test_a_frame_beyond_the_limit_ends_the_connection(mesh: Mesh) -> None:
    with zmq.Context() as context:
        port = mesh.sockets()[Identity(Role.COORDINATOR)]
        with push(context, port, mesh.keys.public, mesh.keys) as sock:
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            sock.send(bytes(MAX_FRAME_BYTES + 1))
            assert monitor.poll(1000 * LIMIT_S)
            sock.disable_monitor()
            monitor.close(0)


@pytest.mark.usefixtures("unharmed")
def test_without_the_key(mesh: Mesh, tmp_path: Path) -> None:
    """No key, a wrong one, a wrong one of somebody who knows the mesh's public key: none gets a frame in."""
    stranger = load(made_keys(tmp_path / "other"))
    failed = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    with zmq.Context() as context:
        for port in mesh.sockets().values():
            for server, own in ((b"", None), (stranger.public, stranger), (mesh.keys.public, stranger)):
                with (
                    push(context, port, server, own, connect=False) as sock,
                    sock.get_monitor_socket(failed) as monitor,
                ):
                    sock.connect(f"tcp://127.0.0.1:{port}")  # now that nothing can be missed
                    assert monitor.poll(1000 * LIMIT_S), "the connection was not refused"
                    sock.disable_monitor()
    until(lambda: any("connection refused" in line and "its key is unknown" in line for line in list(mesh.head.lines)))


@pytest.mark.usefixtures("unharmed")
def test_bytes_that_are_not_zeromq(mesh: Mesh) -> None:
    chance = random.Random(1)
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + bytes(15)
    for port in mesh.sockets().values():
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            chance.randbytes(5000),
            greeting,
            greeting + b"\0" * 32 + b"\4\xff" * 200,
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as sock:
                sock.sendall(data)
        held = [socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) for _ in range(20)]
        for sock in held:
            sock.close()
