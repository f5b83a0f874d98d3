"""All of a worker that other meshes read and write: its page server, the prompts that it leaves, those that it sends at once, and the
pings that tell a proxy that it is there. Made by moves.py where --kv-transfer-config names a connector between meshes.

Two threads beside the server's: one sends prompts, in order; one pings.
"""

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog
import zmq

from meshlm.protocol.config.kv_transfer import PageTransfer
from meshlm.protocol.edges.kv import KEY_BYTES, LeavePages, PagesTaken
from meshlm.protocol.wire.columns import ints
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.kv.connectors import Page
from meshlm.workers.kv.remote.connector import RemoteConnector
from meshlm.workers.kv.remote.frames import Broken
from meshlm.workers.kv.remote.server import PageServer, ReadPages
from meshlm.workers.kv.remote.slices import PageShape
from meshlm.workers.kv.remote.tickets import Held

PING_S = 3.0  # as vLLM's
_log = structlog.get_logger()


class PageExchange:
    """`say` sends a message to the scheduler, from any thread."""

    def __init__(
        self, transfer: PageTransfer, worker: int, shape: PageShape, read: ReadPages, say: Callable[[PagesTaken], None]
    ) -> None:
        """worker: its number in the mesh, which its port is counted by. ProcessFatal where the address cannot be had."""
        self._transfer, self._read, self._say = transfer, read, say
        port = transfer.port + worker if transfer.port else 0
        try:
            listener = socket.create_server((transfer.host, port))
        except (OSError, OverflowError) as error:
            raise ProcessFatal(f"--kv-transfer-config: kv_ip {transfer.host}, port {port}: {error}") from None
        self.server = PageServer(listener, shape, read, self._taken, transfer.buffer_bytes)
        self._prompts: queue.SimpleQueue[tuple[bytes, Held, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._send_prompts, name="prompts to other meshes", daemon=True).start()
        if transfer.proxy and worker == 0:
            threading.Thread(target=self._ping, name="pings", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Where other meshes find this worker's pages."""
        return self._transfer.host, self.server.address[1]

    def rename(self, namespace: bytes) -> None:
        """Pages mean this from now on; what was left or sent before means something else."""
        self.server.namespace = namespace
        self.server.tickets.clear()

    def connector(self) -> RemoteConnector:
        """What this worker reads other meshes' pages with."""
        return RemoteConnector(self.server)

    def leave(self, left: LeavePages) -> None:
        """Other meshes may read these pages; whom the request names is sent them."""
        keys = [left.keys[at : at + KEY_BYTES] for at in range(0, len(left.keys), KEY_BYTES)]
        places: dict[bytes, list[int | Page]] = {}
        for key, page in zip(keys, ints(left.pages), strict=True):
            places.setdefault(key, []).append(page)
        held = Held(places, left.deadline_ns, left.session, left.number)
        params = msgspec.json.decode(left.params, type=dict[str, Any]) if left.params else {}
        if self._transfer.pushes and "push_host" in params:
            self._prompts.put((left.ticket, held, params))
        else:
            self.server.tickets.leave(left.ticket, held)

    def reset(self) -> None:
        """A session with the scheduler ends, and with it what was left."""
        self.server.tickets.reset()

    def close(self) -> None:
        self._ended.set()
        self._prompts.put(None)
        self.server.close()

    def _taken(self, session: int, number: int) -> None:
        self._say(PagesTaken(session, number))

    # --- threads of its own ---

    def _send_prompts(self) -> None:
        sender = RemoteConnector(self.server)
        while (prompt := self._prompts.get()) is not None:
            ticket, held, params = prompt
            numbers = [(key, page) for key, pages in held.places.items() for page in pages if isinstance(page, int)]
            try:
                pages = self._read(held.session, [page for _, page in numbers], held.deadline_ns)
                sender.push([key for key, _ in numbers][: len(pages)], pages, params)
            except (Broken, OSError, ValueError) as error:
                _log.warning("a prompt was not sent and waits to be asked for", reason=str(error))
                self.server.tickets.leave(ticket, held)
            else:
                self._taken(held.session, held.number)

    def _ping(self) -> None:
        """Until the worker ends."""
        transfer = self._transfer
        host, port = self.address
        kind = "D" if transfer.role == "kv_consumer" else "P"
        said = msgspec.msgpack.encode(
            {"type": kind, "http_address": transfer.http_address, "zmq_address": f"{host}:{port}"}
        )
        with zmq.Context() as context, context.socket(zmq.DEALER) as proxy:
            proxy.set(zmq.LINGER, 0)
            proxy.set(zmq.SNDHWM, 1)
            proxy.connect(f"tcp://{transfer.proxy}")
            while True:
                if proxy.poll(0, zmq.POLLOUT):
                    proxy.send(said)
                if self._ended.wait(PING_S):
                    return
