"""What the control plane's work costs on this machine at the least: the yardstick that control_plane.py holds its figures against.

Two measurements, CPU µs per token, the client being control_plane.py's own:

- `send`: after every sleep of a step's length a chunk goes to each client by a bare send(2), nothing else. The sleep lets other
  processes take the caches, as in a mesh.
- `mesh`: four processes that pass columns on over ZeroMQ (step plans and results, tokens, texts) and send chunks, without sessions,
  journal, requests or anything that could go wrong.

Called by control_plane.py.
"""

import asyncio
import json
import os
import resource
import socket
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import suppress

import msgspec
import uvloop
import zmq
from msgspec import Struct

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PREFIX = b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"fake",'
PREFIX += b'"choices":[{"index":0,"text":'
SUFFIX = b',"logprobs":null,"finish_reason":null}]}\n\n'
VOCABULARY = [f" word{number}" for number in range(32000)]
LIMIT_S = 60.0
ROLES = ("worker", "scheduler", "detokenizer", "frontend")


class Columns(Struct):
    """One message of the minimal mesh: a step's rows."""

    handles: bytes
    starts: bytes
    token_ids: bytes
    texts: list[str] = []


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def accept(listener: socket.socket, streams: int) -> list[socket.socket]:
    """All clients of a run, each with its answer begun."""
    clients = [listener.accept()[0] for _ in range(streams)]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.recv(65536)
        client.send(HEAD)
        client.setblocking(False)
    return clients


def send_only(listener: socket.socket, streams: int, steps: int, step_s: float) -> float:
    """CPU seconds of nothing but the sends."""
    clients = accept(listener, streams)
    middle = b'" word1234"'
    chunk = b"%x\r\n%b\r\n" % (len(PREFIX + middle + SUFFIX), PREFIX + middle + SUFFIX)
    begun = cpu_s()
    for _ in range(steps):
        time.sleep(step_s)
        for client in clients:
            client.send(chunk)
    used = cpu_s() - begun
    for client in clients:
        client.close()
    return used


class Process:
    """One process of the minimal mesh: an inbox, sockets to others, what to do with a message."""

    def __init__(self, role: str, folder: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder = folder
        self.inbox = self._context.socket(zmq.PULL)
        self._peers: list[zmq.Socket[bytes]] = []
        self.inbox.bind(f"ipc://{folder}/{role}")
        self.encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Columns).decode
        self.left = 0
        self._end: asyncio.Future[None] | None = None

    def to(self, role: str) -> Callable[[bytes], object]:
        peer = self._context.socket(zmq.PUSH)
        peer.connect(f"ipc://{self._folder}/{role}")
        self._peers.append(peer)
        return peer.send

    async def run(self, steps: int, handle: Callable[[Columns], None]) -> float:
        """CPU seconds of so many messages."""
        loop = asyncio.get_running_loop()
        self.left, self._end = steps, loop.create_future()
        loop.add_reader(self.inbox.FD, self._read, handle)
        used = cpu_s()
        self._read(handle)
        await asyncio.wait_for(self._end, LIMIT_S)
        used = cpu_s() - used
        loop.remove_reader(self.inbox.FD)
        for end in (self.inbox, *self._peers):
            end.close(1000)  # ms for what was sent last
        self._context.term()
        return used

    def _read(self, handle: Callable[[Columns], None]) -> None:
        assert self._end is not None
        with suppress(zmq.Again):
            while self.left:
                handle(self._decode(self.inbox.recv(zmq.NOBLOCK)))
                self.left -= 1
        if not self.left and not self._end.done():
            self._end.set_result(None)


async def role_main(role: str, folder: str, listener: socket.socket, streams: int, steps: int, step_s: float) -> float:
    """CPU seconds of one process of the minimal mesh, less its start."""
    process = Process(role, folder)
    encode = process.encode
    handles = array("i", range(streams)).tobytes()
    starts = array("q", range(streams)).tobytes()  # two columns, as a plan has
    if role == "worker":
        to_scheduler, loop = process.to("scheduler"), asyncio.get_running_loop()
        tokens = array("i", [1000 + number for number in range(streams)]).tobytes()

        def step(plan: Columns) -> None:
            loop.call_later(step_s, to_scheduler, encode(Columns(b"", b"", tokens)))

        return await process.run(steps + 1, step)
    if role == "scheduler":
        to_worker, to_detokenizer = process.to("worker"), process.to("detokenizer")

        def result(columns: Columns) -> None:
            if columns.token_ids:  # else it is the frontend's word that all clients are there
                to_detokenizer(encode(Columns(handles, starts, columns.token_ids)))
            to_worker(encode(Columns(handles, starts, b"")))

        return await process.run(steps + 1, result)
    if role == "detokenizer":
        to_frontend = process.to("frontend")

        def decode(columns: Columns) -> None:
            texts = [VOCABULARY[token] for token in memoryview(columns.token_ids).cast("i")]
            to_frontend(encode(Columns(handles, columns.starts, columns.token_ids, texts)))

        return await process.run(steps, decode)
    clients = accept(listener, streams)
    text_of = msgspec.json.Encoder().encode
    process.to("scheduler")(encode(Columns(b"", b"", b"")))

    def write(columns: Columns) -> None:
        for client, text in zip(clients, columns.texts):
            middle = text_of(text)
            size = len(PREFIX) + len(middle) + len(SUFFIX)
            client.send(b"%x\r\n%b%b%b\r\n" % (size, PREFIX, middle, SUFFIX))

    return await process.run(steps, write)


def child(work: Callable[[], float]) -> "tuple[int, int]":
    """Run it in a process of its own: its id, and where its seconds can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.write(writing, json.dumps(work()).encode())
    finally:
        os._exit(0)


Load = Callable[[int, int, int], object]  # port, streams, tokens: opens all streams, returns when they have ended


def measure(load: Load, streams: int, steps: int, step_s: float) -> dict[str, object]:
    """Both floors, CPU µs per token."""
    scale = 1e6 / (streams * steps)
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener, tempfile.TemporaryDirectory() as folder:
        port = int(listener.getsockname()[1])
        sender = child(lambda: send_only(listener, streams, steps, step_s))
        send = _collect(load, port, streams, steps, {"send": sender})["send"] * scale
        children = {}
        for role in ROLES:
            children[role] = child(
                lambda role=role: uvloop.run(role_main(role, folder, listener, streams, steps, step_s))  # type: ignore[misc]
            )
        used = _collect(load, port, streams, steps, children)
    mesh = {role: round(seconds * scale, 2) for role, seconds in used.items()}
    plane = sum(value for role, value in mesh.items() if role != "worker")
    return {"send": round(send, 2), "mesh": mesh, "mesh_plane": round(plane, 2)}


def _collect(
    load: Load, port: int, streams: int, steps: int, children: "dict[str, tuple[int, int]]"
) -> dict[str, float]:
    load(port, streams, steps)
    used = {}
    for name, (pid, reading) in children.items():
        with os.fdopen(reading, "rb") as pipe:
            used[name] = float(json.loads(pipe.read()))
        os.waitpid(pid, 0)
    return used
