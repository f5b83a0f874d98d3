"""What a worker lets other meshes read of its KV cache, and what they send it: a TCP server with a thread for each connection.

A *ticket* comes from the scheduler with the pages that it leases (`leave`), or from another mesh with the bytes themselves (Put), which
are kept in a bounded buffer. Pages of the KV cache are read by the mover, in the session of their ticket and before its deadline only,
which is earlier than the end of their lease.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meshlm.protocol.edges.kv import NAMESPACE_BYTES
from meshlm.protocol.remote_pages import TICKET_BYTES, VERSION, Done, Find, Hello, Put, Read, Reply, Request
from meshlm.workers.kv.connectors import Page
from meshlm.workers.kv.remote.frames import Broken, receive_page, receive_request, send, send_page, split
from meshlm.workers.kv.remote.slices import PageShape
from meshlm.workers.kv.remote.tickets import Held, Tickets

IDLE_S = 60.0  # a connection that says nothing for so long is closed
MAX_CONNECTIONS = 256
MAX_WAIT_S = 30.0
MAX_RANKS = 1024  # of another mesh
AT_ONCE_BYTES = 16 << 20  # of pages that are read from the KV cache at once
ReadPages = Callable[[int, Sequence[int], int], Sequence[Page]]
"""Pages of the KV cache, of a session, until a deadline (monotonic, ns; 0: none). Fewer than were asked for: the rest is nobody's."""


class PageServer:
    """`read` copies pages of the KV cache. `taken(session, number)` is told once a ticket of the scheduler's is done with."""

    def __init__(
        self,
        listener: socket.socket,
        shape: PageShape,
        read: "ReadPages",
        taken: Callable[[int, int], None],
        buffer_bytes: int = 0,
    ) -> None:
        self.namespace = b""  # set before the first ticket
        self.shape = shape
        self.tickets = Tickets(shape.page_bytes, buffer_bytes)
        self._listener, self._read, self._taken = listener, read, taken
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        listener.listen()
        threading.Thread(target=self._accept, name="page server", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="page reader", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, to its end: whatever it says that is wrong ends it alone."""
        try:
            with connection:
                connection.settimeout(IDLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (request := receive_request(connection)) is not None:
                    self._answer(connection, request)
        except (Broken, OSError):
            pass  # the other side sees that it is over
        finally:
            self._connections.release()

    def _answer(self, connection: socket.socket, request: Request) -> None:
        match request:
            case Hello():
                shard = self.shape.shard
                send(connection, Reply(error=_of_version(request), tp_size=shard.tp_size, pp_size=shard.pp_size))
            case Find():
                send(connection, self._found(request))
            case Read():
                self._send_pages(connection, request)
            case Put():
                self._keep(connection, request)
            case Done():
                readers = self._readers(request).keys()
                held = self.tickets.done(request.ticket, request.tp_rank, readers)
                if held is not None and held.number >= 0:
                    self._taken(held.session, held.number)
                send(connection, Reply())

    def _readers(self, request: Read | Done) -> dict[int, range]:
        """The ranks of that mesh that read here, and which heads. Broken where this one is none of them."""
        size = request.tp_size
        if 0 < size <= MAX_RANKS and not self.shape.why_not(size, self.shape.shard.pp_size):
            readers = self.shape.given_to(size)
            if request.tp_rank in readers:
                return readers
        raise Broken(f"rank {request.tp_rank} of {size} has no heads here")

    def _refusal(self, request: Find | Put) -> str:
        if error := _of_version(request):
            return error
        if request.namespace != self.namespace:
            return "another model, other weights, or another layout of the KV cache"
        if len(request.ticket) != TICKET_BYTES or len(request.namespace) != NAMESPACE_BYTES:
            return "no ticket"
        return ""

    def _found(self, find: Find) -> Reply:
        if error := self._refusal(find):
            return Reply(error=error)
        keys = split(find.keys)
        held = self.tickets.wait(find.ticket, max(0.0, min(find.wait_s, MAX_WAIT_S)))
        return Reply(bytes(held is not None and key in held.places for key in keys))

    def _send_pages(self, connection: socket.socket, read: Read) -> None:
        heads, keys = self._readers(read)[read.tp_rank], split(read.keys)
        held = self.tickets.find(read.ticket)
        places = held.of(keys) if held is not None else [None] * len(keys)
        send(connection, Reply(bytes(place is not None for place in places)))
        there = [place for place in places if place is not None]
        at_once = max(1, AT_ONCE_BYTES // self.shape.page_bytes)
        for at in range(0, len(there), at_once):
            for page in self._pages(held, there[at : at + at_once]):
                send_page(connection, self.shape.cut(page, heads))

    def _pages(self, held: "Held | None", places: "list[int | Page]") -> Iterator[Page]:
        """Broken where the lease has ended."""
        numbers = [place for place in places if isinstance(place, int)]
        if not numbers or held is None:
            yield from (place for place in places if not isinstance(place, int))
            return
        read = self._read(held.session, numbers, held.deadline_ns)
        if len(read) < len(numbers):
            raise Broken("the lease ended")
        yield from read

    def _keep(self, connection: socket.socket, put: Put) -> None:
        keys = split(put.keys)
        error = self._refusal(put) or ("" if keys else "no pages")
        heads = None if error else self._senders(put).get(put.tp_rank)
        if not error and heads is None:
            error = f"rank {put.tp_rank} of {put.tp_size} has no heads of this worker"
        count = 0 if heads is None else -(-len(keys) * len(heads) // len(self.shape.heads))  # in whole pages
        if not error and not self.tickets.receive(count):
            error = f"{len(keys)} pages are more than the buffer has room for (kv_buffer_size)"
        if error or heads is None:
            send(connection, Reply(error=error))
            return
        try:
            send(connection, Reply())
            pages: dict[bytes, list[int | Page]] = {}
            for key in keys:
                page = np.empty(self.shape.piece_bytes(heads), np.uint8)
                if receive_page(connection, page):
                    pages.setdefault(key, []).append(page)
            self._received(put, pages, count)
            send(connection, Reply())
        finally:
            self.tickets.received(count)

    def _senders(self, put: Put) -> dict[int, range]:
        """The ranks of that mesh that send to this worker, and which heads."""
        size = put.tp_size
        is_known = 0 < size <= MAX_RANKS and not self.shape.why_not(size, self.shape.shard.pp_size)
        return self.shape.taken_from(size) if is_known else {}

    def _received(self, put: Put, pages: dict[bytes, list[int | Page]], count: int) -> None:
        """Pages are there once all ranks that have heads of them have sent theirs."""
        senders = self._senders(put)
        if len(senders) == 1:
            self.tickets.keep(put.ticket, pages, count)
            return
        with self.tickets.lock:
            names = {sender: put.ticket + sender.to_bytes(2, "big") for sender in senders}  # no ticket is as long
            self.tickets.keep(names[put.tp_rank], pages, count)
            found = {senders[sender]: self.tickets.find(name) for sender, name in names.items()}
            sent = {heads: held for heads, held in found.items() if held is not None}
            if len(sent) == len(senders):
                for name in names.values():
                    self.tickets.end(name)
                whole = {key: self._joined(sent, key) for key in pages}
                self.tickets.keep(put.ticket, whole, sum(map(len, whole.values())))

    def _joined(self, sent: dict[range, Held], key: bytes) -> list[int | Page]:
        """The pages of a key, each of what all have sent of it; none where one has not."""
        found = list[int | Page]()
        for pieces in zip(*(held.places.get(key, []) for held in sent.values()), strict=False):
            page = np.empty(self.shape.page_bytes, np.uint8)
            for heads, piece in zip(sent, pieces, strict=True):
                assert not isinstance(piece, int)
                self.shape.fill(page, heads, piece)
            found.append(page)
        return found


def _of_version(request: Hello | Find | Put) -> str:
    """Why a request is not understood; empty: it is."""
    if request.version != VERSION:
        return f"version {request.version} of the protocol, and this is {VERSION}"
    return ""
