"""Nonsense on the wire of a real mesh: it is logged and dropped, nobody dies, and requests are served as before."""

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from fake_oracle import expected_token
from seeing_models import VOCAB, seeing_model
from serving import Serving, serving
from waiting import until

from meshlm.protocol.edges.text import Abort, Detokenize, Submit, TokenPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.channels import BY_DIRECTION, MAX_FRAME_BYTES
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.frames import HEADER_BYTES, Header, Kind, pack, unpack
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.wire.session import Hello

pytestmark = pytest.mark.mesh
Socket = zmq.Socket[bytes]
LIMIT_S = 20
FLAGS: tuple[str, ...] = ("--load-format", "dummy", "--device", "fake", "--max-model-len", "4096")
FLAGS += ("--kv-offloading-size", "0.05")  # a process of each role, with a model that sees
strangers = itertools.count(77)  # indices of the peers that we play
PLAYED = {  # whom we play towards each process
    Role.SUPERVISOR: Role.FRONTEND,
    Role.FRONTEND: Role.DETOKENIZER,
    Role.DETOKENIZER: Role.FRONTEND,
    Role.COORDINATOR: Role.FRONTEND,
    Role.SCHEDULER: Role.DETOKENIZER,
    Role.WORKER: Role.COORDINATOR,  # other ranks' schedulers are not heard
    Role.STORE: Role.SCHEDULER,
    Role.MEDIA: Role.FRONTEND,
}
CHILDREN = [role for role in Role if role is not Role.SUPERVISOR]


class Peer:
    """A process that we play: one identity towards one process, with sockets as the real ones have them."""

    def __init__(self, context: "zmq.Context[Socket]", run_dir: str, target: Identity, sender: Identity) -> None:
        self.target, self.me, self.life = target, sender, Incarnation(1)
        self._address = f"ipc://{run_dir}/{sender.role.value}-{sender.index}.sock"
        self._inbox = context.socket(zmq.PULL)
        self._inbox.bind(self._address)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{run_dir}/{target.role.value}-{target.index}.sock")

    def send(self, frame: bytes) -> None:
        self._outbox.send(frame)

    def frame(self, kind: Kind, body: bytes = b"", **changes: Any) -> bytes:
        header = Header(kind, self.me, self.target, self.life, Incarnation(0), 0, 0)
        return pack(header._replace(**changes), body)

    def hello(self, digest: str) -> bytes:
        return self.frame(Kind.HELLO, msgspec.msgpack.encode(Hello(digest, self._address)))

    def receive(self, kind: Kind) -> tuple[Header, bytes]:
        """The next frame of this kind."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if self._inbox.poll(timeout=1000 * LIMIT_S):
                header, body = unpack(self._inbox.recv())
                if header.kind is kind:
                    return header, bytes(body)
        raise AssertionError(f"no {kind.name} of {self.target}")

    def barrier(self) -> None:
        """All that was sent has been read: it is answered in order that we are of another version."""
        self.send(self.hello("of another version"))
        header, body = self.receive(Kind.REFUSE)
        assert (header.sender, header.receiver) == (self.target, self.me)
        assert b"of another version" in body
        assert b"different versions of meshlm" in body

    def close(self) -> None:
        self._inbox.close(0)
        self._outbox.close(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(seeing_model(tmp_path_factory.mktemp("seeing") / "model"))


@pytest.fixture(scope="module")
def mesh(folder: str) -> Iterator[Serving]:
    with serving(folder, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def context() -> Iterator["zmq.Context[Socket]"]:
    with zmq.Context() as found:
        yield found


@contextlib.contextmanager
def played(context: "zmq.Context[Socket]", mesh: Serving, role: Role) -> Iterator[Peer]:
    peer = Peer(context, mesh.run_dir, Identity(role), Identity(PLAYED[role], next(strangers)))
    try:
        yield peer
    finally:
        peer.close()


first_pids: dict[str, dict[str, int]] = {}  # by run directory


@contextlib.contextmanager
def unharmed(mesh: Serving, limit_s: float = LIMIT_S) -> Iterator[None]:
    """After the block all processes are the mesh's first ones, and a request is answered rightly and in time."""
    if mesh.run_dir not in first_pids:
        first_pids[mesh.run_dir] = pids(mesh)
    yield
    prompt = [random.randrange(300, VOCAB) for _ in range(40)]
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=limit_s)
    assert answer.status_code == 200
    tokens = list(prompt)
    for _ in range(20):
        tokens.append(expected_token(tokens, VOCAB))
    assert answer.json()["choices"][0]["token_ids"] == tokens[40:]
    assert pids(mesh) == first_pids[mesh.run_dir]


def pids(mesh: Serving) -> dict[str, int]:
    processes = mesh.status()["processes"]
    assert len(processes) == len(Role)
    assert all(process["restarts"] == 0 and process["state"] == "ready" for process in processes)
    return {process["role"]: process["pid"] for process in processes}


def logged(mesh: Serving, *words: str) -> int:
    """How many lines have all these words."""
    return sum(all(word in line for word in words) for line in mesh.lines)


# --- frames that are none ---


def malformed(peer: Peer, chance: random.Random) -> Iterator[bytes]:
    """Each of these is a line in the log of a process that is not the supervisor."""
    good = peer.hello(schema_digest())
    yield b""
    for length in range(1, HEADER_BYTES):
        yield good[:length]
        yield chance.randbytes(length)
    for length in (HEADER_BYTES, 49, 100, 1000, 10_000, 1 << 20):
        yield chance.randbytes(length)
    for place in range(3):  # magic, version
        yield good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :]
    for place in (3, 4, 5):  # kind, roles
        for value in (len(Role) + 1, 99, 255):
            yield good[:place] + bytes([value]) + good[place + 1 :]
    for receiver in (Identity(peer.target.role, 1), Identity(peer.target.role, 65535), peer.me):
        for kind in Kind:
            yield peer.frame(kind, chance.randbytes(50), receiver=receiver)
    unknown = Identity(peer.me.role, 9999)
    for kind in set(Kind) - {Kind.HELLO}:
        yield peer.frame(kind, chance.randbytes(50), sender=unknown)
    for role in Role:
        if (role, peer.target.role) not in BY_DIRECTION:
            yield peer.frame(Kind.HELLO, good[HEADER_BYTES:], sender=Identity(role, peer.me.index))


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_malformed_frames(mesh: Serving, context: "zmq.Context[Socket]", role: Role) -> None:
    frames: list[bytes] = []
    with unharmed(mesh), played(context, mesh, role) as peer:
        frames += malformed(peer, random.Random(role.value))
        for frame in frames:
            peer.send(frame)
        peer.barrier()
    if role is not Role.SUPERVISOR:
        until(lambda: logged(mesh, "frame dropped", f"process={role.value}/0") >= len(frames))
        assert logged(mesh, "link refused", f"process={role.value}/0")


def test_the_supervisor_logs_where_all_others_do(mesh: Serving, context: "zmq.Context[Socket]") -> None:
    with played(context, mesh, Role.SUPERVISOR) as peer:
        peer.send(b"nonsense")
        peer.barrier()
    until(lambda: logged(mesh, "frame dropped", "process=supervisor/0") > 0, 0.5)


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_random_frames(mesh: Serving, context: "zmq.Context[Socket]", role: Role) -> None:
    """Headers that are right but for a few bits, with random bodies."""
    chance = random.Random(role.value)
    with unharmed(mesh), played(context, mesh, role) as peer:
        for _ in range(300):
            frame = bytearray(peer.frame(chance.choice(list(Kind)), chance.randbytes(chance.randrange(200))))
            for _ in range(chance.randrange(3)):
                place = chance.choice([*range(8), *range(16, HEADER_BYTES)])
                frame[place] ^= 1 << chance.randrange(8)
            if frame[6:8] != b"\0\0":  # only the process with index 0 is real
                peer.send(bytes(frame))
        peer.barrier()


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_frames_at_and_beyond_the_limit(mesh: Serving, context: "zmq.Context[Socket]", role: Role) -> None:
    """One byte more ends the connection before it takes memory; what fits is read and dropped."""
    with unharmed(mesh), played(context, mesh, role) as peer:
        before = rss(mesh, role)
        with context.socket(zmq.PUSH) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            sock.connect(f"ipc://{mesh.run_dir}/{role.value}-0.sock")
            sock.send(bytes(MAX_FRAME_BYTES + 1))
            assert monitor.poll(1000 * LIMIT_S), "the connection was not ended"
            sock.disable_monitor()
            monitor.close(0)
        peer.barrier()
        assert rss(mesh, role) - before < 32 << 20
        peer.send(bytes(MAX_FRAME_BYTES))
        peer.barrier()
    if role is not Role.SUPERVISOR:
        until(lambda: logged(mesh, "frame dropped", f"process={role.value}/0", f"size={MAX_FRAME_BYTES}") == 1)


def rss(mesh: Serving, role: Role) -> int:
    lines = Path(f"/proc/{first_pids[mesh.run_dir][role.value]}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_parts_and_wrong_sockets(mesh: Serving, context: "zmq.Context[Socket]", role: Role) -> None:
    path = f"{mesh.run_dir}/{role.value}-0.sock"
    with unharmed(mesh):
        with context.socket(zmq.PUSH) as sock:
            sock.connect(f"ipc://{path}")
            sock.send_multipart([b"", b"x" * 100, b"ML\1\3" + bytes(44)])
        for kind in (zmq.DEALER, zmq.PUB, zmq.PAIR, zmq.REQ):
            with context.socket(kind) as sock:
                sock.setsockopt(zmq.LINGER, 0)
                sock.connect(f"ipc://{path}")
                with contextlib.suppress(zmq.Again):
                    sock.send(b"x" * 100, zmq.NOBLOCK)
        for data in (
            b"",
            b"\xff" + bytes(8) + b"\x7f\x03",
            random.Random(0).randbytes(100_000),
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.connect(path)
                raw.sendall(data)
        with played(context, mesh, role) as peer:
            peer.barrier()


def status_answer(mesh: Serving, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LIMIT_S)
        raw.connect(f"{mesh.run_dir}/status.sock")
        try:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            return raw.recv(10_000)
        except (BrokenPipeError, ConnectionResetError):
            return b"error: closed while we wrote"


def test_the_status_socket(mesh: Serving) -> None:
    lines = (b"", b"\n", b"{", b"[]\n", b"5\n", b'{"command": 5}\n', b"\xff\xfe\n", b"x" * 1_000_000)
    with unharmed(mesh):
        for line in lines:
            assert b"error" in status_answer(mesh, line), line[:20]


def test_a_nested_question_to_the_status_socket(mesh: Serving) -> None:
    with unharmed(mesh):
        assert b"error" in status_answer(mesh, b"[" * 60_000 + b"\n")


# --- messages that are none ---


@contextlib.contextmanager
def opened(context: "zmq.Context[Socket]", mesh: Serving, role: Role) -> Iterator[Callable[[bytes], None]]:
    """A session with this process as a member of the mesh has it; gives what sends a message's bytes."""
    with played(context, mesh, role) as peer:
        peer.life = Incarnation(time.time_ns())
        peer.send(peer.hello(schema_digest()))
        header, _ = peer.receive(Kind.WELCOME)
        numbers = iter(range(1, 1 << 30))

        def send(body: bytes) -> None:
            life = header.sender_epoch
            peer.send(peer.frame(Kind.DATA, body, receiver_epoch=life, seq=next(numbers)))

        yield send


@pytest.mark.parametrize("role", [Role.DETOKENIZER, Role.SCHEDULER, Role.COORDINATOR], ids=lambda role: role.value)
def test_messages_of_no_known_type(mesh: Serving, context: "zmq.Context[Socket]", role: Role) -> None:
    chance = random.Random(role.value)
    bodies = [b"", b"\xc1", msgspec.msgpack.encode({"type": "nonsense"}), msgspec.msgpack.encode({"type": "submit"})]
    bodies += [b"\xff" + chance.randbytes(chance.randrange(1000)) for _ in range(100)]
    with unharmed(mesh):
        already = logged(mesh, "message dropped", f"process={role.value}/0")
        with opened(context, mesh, role) as send:
            for body in bodies:
                send(body)
            until(lambda: logged(mesh, "message dropped", f"process={role.value}/0") >= already + len(bodies))


def test_messages_of_a_known_type_that_say_nonsense(mesh: Serving, context: "zmq.Context[Socket]") -> None:
    """A detokenizer is not brought down by a frontend that counts its bytes wrongly."""
    encode = msgspec.msgpack.Encoder().encode
    prompt, sampling, handle = TokenPrompt(b"abc"), SamplingParams(), Handle(1)
    with unharmed(mesh), opened(context, mesh, Role.DETOKENIZER) as send:
        send(encode(Detokenize(handle, b"abc")))
        send(encode(Detokenize(handle, b"\xff" * 400)))
        send(encode(Submit((), (), prompt, sampling)))
        send(encode(Submit((handle,), (), TokenPrompt(b"\x05\0\0\0"), sampling)))
        send(encode(Submit((handle,), (RequestId("odd"),), prompt, sampling)))
        send(encode(Submit((handle,), (RequestId("odd"),), TokenPrompt(b"\xff" * 4), sampling, delivered=b"abc")))
        send(encode(Abort((RequestId("nobody"),))))
        send(b"\xc1")
        already = logged(mesh, "message dropped", "process=detokenizer/0")
        until(lambda: logged(mesh, "message dropped", "process=detokenizer/0") > already)


def test_a_late_refusal_of_an_earlier_life(context: "zmq.Context[Socket]", folder: str) -> None:
    """A frame of another life of a peer means nothing to the session with this one."""
    with serving(folder, *FLAGS) as mesh, context.socket(zmq.PUSH) as sock, unharmed(mesh, limit_s=1.8):
        with unharmed(mesh):
            sock.connect(f"ipc://{mesh.run_dir}/detokenizer-0.sock")
        sender, receiver, life = Identity(Role.FRONTEND), Identity(Role.DETOKENIZER), Incarnation(1)
        sock.send(pack(Header(Kind.REFUSE, sender, receiver, life, life, 0, 0), b"an earlier life"))
        sock.send(pack(Header(Kind.REFUSE, sender, Identity(Role.DETOKENIZER, 9), life, life, 0, 0)))
        until(lambda: logged(mesh, "frame dropped", "for detokenizer/9") > 0)
