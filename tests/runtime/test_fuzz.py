"""Two processes of two nodes in one loop, with real CURVE sockets: fuzzed frames, wrong keys, roles that are not theirs, silence.

tests/runtime/mesh/test_link.py has the same for ipc and whole processes, tests/mesh/test_fuzz_tcp.py for the tcp sockets of a mesh.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from msgspec import Struct
from waiting import free_ports

from meshlm.protocol.config import MeshConfig, NetworkConfig, Node, RunConfig
from meshlm.protocol.edges.control import Join, Member, Members
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.frames import Header, Kind, pack
from meshlm.protocol.wire.ids import COORDINATOR, Epoch, Identity, Incarnation, Role
from meshlm.protocol.wire.session import Hello
from meshlm.runtime.mesh import keys, tcp
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.logs import Limited

LIMIT_S = 15
SCHEDULER = Identity(Role.SCHEDULER, 1)
LOST_S = 0.6


class Seen:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.messages: list[Struct] = []
        self.up: list[tuple[Identity, int]] = []
        self.down: list[tuple[Identity, int, str]] = []

    def on_message(self, peer: Identity, message: Struct) -> None:
        self.messages.append(message)

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self.up.append((peer, incarnation))

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self.down.append((peer, incarnation, reason))

    def flush(self) -> None:
        pass


def write_keys(path: Path) -> str:
    public, secret = zmq.curve_keypair()
    path.write_text(json.dumps({"public_key": public.decode(), "secret_key": secret.decode()}))
    path.chmod(0o600)
    return str(path)


class Pair:
    """The coordinator of a head on 127.0.0.1 and a scheduler of a node on 127.0.0.2."""

    def __init__(self, tmp_path: Path) -> None:
        self.key_file = write_keys(tmp_path / "key")
        self.port = free_ports(2, "127.0.0.1", "127.0.0.2")
        self.seen = {COORDINATOR: Seen(), SCHEDULER: Seen()}
        self.head = self.make(tmp_path / "head", COORDINATOR, self.key_file)
        self.node = self.make(tmp_path / "node", SCHEDULER, self.key_file)

    def make(self, folder: Path, identity: Identity, key_file: str, life: int = 1000) -> Mesh:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_head = identity == COORDINATOR
        listen = f"tcp://127.0.0.1:{self.port}"
        place = Node(
            index=0 if is_head else 2,
            id=folder.name,
            address="127.0.0.1" if is_head else "127.0.0.2",
            head="" if is_head else listen.replace("127.0.0.1", "localhost"),  # nodes know it by name
            ranks=(0, 1) if is_head else (1, 1),
            workers=(0, 1) if is_head else (1, 1),
        )
        network = NetworkConfig(listen=listen if is_head else "", key_file=key_file, peer_timeout=LOST_S)
        config = MeshConfig(network=network, run=RunConfig(run_dir=str(folder)), node=place)
        return Mesh(identity, Incarnation(life), config, self.seen.get(identity) or Seen())

    async def open(self) -> None:
        await self.head.open()
        await self.node.open()
        await until(lambda: bool(self.seen[COORDINATOR].up) and bool(self.seen[SCHEDULER].up))

    async def talks(self) -> None:
        """Both directions work."""
        before = {identity: len(seen.messages) for identity, seen in self.seen.items()}
        self.node.send(COORDINATOR, Join(Member(SCHEDULER, Incarnation(1000), "x")))
        await until(lambda: len(self.seen[COORDINATOR].messages) > before[COORDINATOR])
        self.head.send(SCHEDULER, Members(Epoch(1), ()))
        await until(lambda: not self.head._peers[SCHEDULER].session._unacked)


async def until(true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    made = Pair(tmp_path)
    await made.open()
    yield made
    await made.node.close()
    await made.head.close()


def hello_of(pair: Pair, sender: Identity, life: int = 5000, node: str = "elsewhere", address: str = "") -> bytes:
    body = Hello(schema_digest(), "ipc://nowhere", address or "tcp://127.0.0.3:9", node, Incarnation(life))
    header = Header(Kind.HELLO, sender, COORDINATOR, Incarnation(life), Incarnation(0), 0, 0)
    return pack(header, msgspec.msgpack.encode(body))


async def test_links_between_nodes_are_tcp(pair: Pair) -> None:
    assert pair.head._peers[SCHEDULER].outbox.address.startswith("tcp://127.0.0.2:")
    assert pair.node._peers[COORDINATOR].outbox.address == f"tcp://127.0.0.1:{pair.port + 1}"
    await pair.talks()


@pytest.mark.parametrize("seed", range(8))
async def test_fuzzed_frames(pair: Pair, seed: int) -> None:
    """Thousands of frames that are right but for some bytes, or cut, or noise: nothing is raised, the session lives."""
    chance = random.Random(seed)
    seeds = [hello_of(pair, Identity(role, index)) for role in Role for index in (0, 1, 7, 65535)]
    session = pair.head._peers[SCHEDULER].session
    for kind in Kind:
        for epoch in (session._peer_epoch, 0, 1 << 63):
            header = Header(kind, SCHEDULER, COORDINATOR, Incarnation(epoch), session.epoch, chance.randrange(9), 0)
            seeds.append(pack(header, chance.randbytes(chance.randrange(300))))
    read = (pair.head._on_frame, pair.head._on_remote_frame)
    epoch, genuine = session.epoch, session._peer_epoch.to_bytes(8, "little")
    for _ in range(3000):
        frame = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(4)):
            frame[chance.randrange(len(frame))] = chance.randrange(256)
        if chance.random() < 0.3:
            del frame[chance.randrange(len(frame)) :]
        # A frame of the session that is right in all its bytes is the peer's own, for whoever has the key may say it.
        if bytes(frame[3:4]) in (b"\1", b"\2", b"\5") or frame[16:24] != genuine:
            chance.choice(read)(bytes(frame))
    assert session.epoch == epoch
    await pair.talks()
    session.check()


async def test_nobody_elsewhere_is_a_process_of_this_node(pair: Pair) -> None:
    """The head's own rank, detokenizer, frontend and supervisor cannot be claimed over tcp, whatever the key."""
    known = set(pair.head._peers)
    for sender in (
        *(
            Identity(Role.SCHEDULER, 0),
            Identity(Role.WORKER, 0),
            Identity(Role.DETOKENIZER, 0),
            Identity(Role.FRONTEND, 3),
        ),
        *(Identity(Role.SUPERVISOR, 0), COORDINATOR),
    ):
        pair.head._on_remote_frame(hello_of(pair, sender))
    assert set(pair.head._peers) == known
    for address in ("", "ipc:///tmp/x", "tcp://*:1", "tcp://10.0.0.1:99999", "nonsense"):
        pair.head._on_remote_frame(hello_of(pair, Identity(Role.SCHEDULER, 9), address=address or "tcp://"))
    assert set(pair.head._peers) == known
    await pair.talks()


async def test_another_node_cannot_take_a_living_peers_place(pair: Pair) -> None:
    pair.head._on_remote_frame(hello_of(pair, SCHEDULER))
    assert pair.head.incarnation_of(SCHEDULER) == 1000
    await pair.talks()
    assert not pair.seen[COORDINATOR].down


@pytest.mark.parametrize("keyed", ["another pair", "the client's key is unknown", "no key"])
async def test_without_the_key_nothing_is_read(pair: Pair, tmp_path: Path, keyed: str) -> None:
    ours, theirs = keys.load(pair.key_file), keys.load(write_keys(tmp_path / "other"))
    frames: list[bytes] = []
    inbox = pair.head._remote
    assert inbox is not None
    inbox._inbox._on_frame = frames.append
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        if keyed != "no key":
            sock.setsockopt(zmq.CURVE_SERVERKEY, theirs.public if keyed == "another pair" else ours.public)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, theirs.public)
            sock.setsockopt(zmq.CURVE_SECRETKEY, theirs.secret)
        monitor = sock.get_monitor_socket(failed)
        sock.connect(inbox.address)
        sock.send(b"let me in")
        await until(lambda: bool(monitor.poll(0)))
        sock.disable_monitor()
        monitor.close(0)
    assert b"let me in" not in frames


async def test_a_node_that_falls_silent_is_lost_and_comes_back(pair: Pair) -> None:
    """It is down for both, and up for both again, as the same incarnation. Then the link works as before."""
    remotes = [mesh._remote for mesh in (pair.head, pair.node)]
    real = {remote: remote._inbox._on_frame for remote in remotes if remote is not None}
    for remote in real:
        remote._inbox._on_frame = lambda frame: None  # the wire is dead
    await until(lambda: all(seen.down for seen in pair.seen.values()))
    assert pair.seen[COORDINATOR].down == [(SCHEDULER, 1000, f"silent for {LOST_S} s (--peer-timeout)")]
    assert len(pair.seen[SCHEDULER].down) == 1
    assert len(pair.seen[COORDINATOR].up) == 1
    outbox = pair.node._peers[COORDINATOR].outbox
    assert outbox.address == f"tcp://localhost:{pair.port + 1}", "by name: it may be another address when it is back"
    for remote, on_frame in real.items():
        remote._inbox._on_frame = on_frame
    await until(lambda: pair.node._peers[COORDINATOR].session.silent is False and bool(pair.head.peers(Role.SCHEDULER)))
    await until(lambda: bool(pair.node.peers(Role.COORDINATOR)))
    await pair.talks()
    assert pair.seen[COORDINATOR].up[-1] == (SCHEDULER, 1000)


async def test_a_process_that_ends_says_so(pair: Pair, tmp_path: Path) -> None:
    """And its next life, at another port, is found."""
    before = pair.head._peers[SCHEDULER].outbox.address
    await pair.talks()  # a farewell needs a connection
    await pair.node.close()
    await until(lambda: bool(pair.seen[COORDINATOR].down), LOST_S / 2)
    assert pair.seen[COORDINATOR].down == [(SCHEDULER, 1000, "it ended")]
    pair.node = pair.make(tmp_path / "node", SCHEDULER, pair.key_file, life=2000)
    await pair.node.open()
    await until(lambda: pair.head.incarnation_of(SCHEDULER) == 2000 and bool(pair.node.peers(Role.COORDINATOR)))
    assert pair.head._peers[SCHEDULER].outbox.address != before
    await pair.talks()


async def test_a_dropped_peer_is_met_again(pair: Pair) -> None:
    """What `send` does with a peer that does not read is no farewell for ever."""
    pair.head._drop(pair.head._peers[SCHEDULER], "it does not read its messages")
    assert pair.seen[COORDINATOR].down
    await until(lambda: len(pair.seen[COORDINATOR].up) == 2 and len(pair.seen[SCHEDULER].up) == 2)
    await pair.talks()


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ('{"public_key": "a", "secret_key": "b"}', 0o600, "no pair of keys"),
        ("{}", 0o600, "no pair of keys"),
        ("[1]", 0o600, "no pair of keys"),
        ('{"public_key": 1, "secret_key": 2}', 0o600, "no pair of keys"),
        ("\0\0", 0o600, "no pair of keys"),
        ("{}", 0o644, "others can read it"),
        ("{}", 0o660, "others can read it"),
    ],
)
def test_bad_key_files(tmp_path: Path, content: str, mode: int, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(keys.KeyFileError, match=text):
        keys.load(str(file))
    with pytest.raises(keys.KeyFileError, match="No such file"):
        keys.load(str(tmp_path / "none"))


def test_a_pair_of_halves_is_none(tmp_path: Path) -> None:
    one, other = (
        json.loads(Path(write_keys(tmp_path / "1")).read_text()),
        json.loads(Path(write_keys(tmp_path / "2")).read_text()),
    )
    file = tmp_path / "3"
    file.write_text(json.dumps({**one, "secret_key": other["secret_key"]}))
    file.chmod(0o600)
    with pytest.raises(keys.KeyFileError, match="no pair"):
        keys.load(str(file))


def test_keys_do_not_print_their_secret(tmp_path: Path) -> None:
    loaded = keys.load(write_keys(tmp_path / "key"))
    assert loaded.secret.decode() not in f"{loaded} {loaded!r}"


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1:5600", "ipc:///x", "tcp://:5", "tcp://a", "tcp://a:x", "tcp://a:0", "tcp://*:1"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(tcp.AddressError):
        tcp.parse(text)


def test_addresses() -> None:
    assert tcp.parse("tcp://10.0.0.1:5600") == ("10.0.0.1", 5600)
    assert tcp.join(*tcp.parse("tcp://[fd00::1]:5600")) == "tcp://[fd00::1]:5600"
    assert tcp.parse_range("5700-5800") == (5700, 5800)
    for bad in ("", "5", "6-5", "0-4", "1-99999", "a-b"):
        with pytest.raises(tcp.AddressError):
            tcp.parse_range(bad)


def test_what_strangers_cause_in_the_log_is_bounded() -> None:
    lines: list[dict[str, object]] = []

    class Log:
        def warning(self, event: str, **fields: object) -> None:
            lines.append({"event": event, **fields})

    now = 0.0
    limited = Limited(Log(), lambda: now)
    for _ in range(5 * Limited.BURST):
        limited.warning("frame dropped", reason="noise")
    assert len(lines) == Limited.BURST
    now = 10.0
    limited.warning("frame dropped", reason="noise")
    assert lines[-1] == {"event": "frame dropped", "reason": "noise", "left_out": 4 * Limited.BURST}
