"""What a worker lets other meshes read of its KV cache, and what they send it: a TCP server with a thread for each connection.

A *ticket* comes from the scheduler with the pages that it leases (`leave`), or from another mesh with the bytes themselves (Put), which
are kept in a bounded buffer. Pages of the KV cache are read by the mover, in the session of their ticket and before its deadline only,
which is earlier than the end of their lease.
"""

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshlm.protocol.edges.kv import NAMESPACE_BYTES
from meshlm.protocol.remote_pages import TICKET_BYTES, VERSION, Done, Find, Put, Read, Reply
from meshlm.workers.kv.connectors import Page
from meshlm.workers.kv.remote.frames import Broken, receive_page, receive_request, send, send_page, split

IDLE_S = 60.0  # a connection that says nothing for so long is closed
MAX_CONNECTIONS = 256
MAX_WAIT_S = 30.0
AT_ONCE_BYTES = 16 << 20  # of pages that are read from the KV cache at once
ReadPages = Callable[[int, Sequence[int], int], Sequence[Page]]
"""Pages of the KV cache, of a session, until a deadline (monotonic, ns; 0: none). Fewer than were asked for: the rest is nobody's."""


class PageServer:
    """`read` copies pages of the KV cache. `taken(session, number)` is told once a ticket of the scheduler's is done with."""

    def __init__(
        self,
        listener: socket.socket,
        page_bytes: int,
        read: "ReadPages",
        taken: Callable[[int, int], None],
        buffer_bytes: int = 0,
    ) -> None:
        self.namespace = b""  # set before the first ticket
        self.tickets = Tickets(page_bytes, buffer_bytes)
        self._listener, self._page_bytes, self._read, self._taken = listener, page_bytes, read, taken
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

    def _answer(self, connection: socket.socket, request: Find | Read | Put | Done) -> None:
        match request:
            case Find():
                send(connection, self._found(request))
            case Read(ticket=ticket, keys=keys):
                self._send_pages(connection, ticket, split(keys))
            case Put():
                self._keep(connection, request)
            case Done(ticket=ticket):
                if (held := self.tickets.end(ticket)) is not None and held.number >= 0:
                    self._taken(held.session, held.number)
                send(connection, Reply())

    def _refusal(self, request: Find | Put) -> str:
        if request.version != VERSION:
            return f"version {request.version} of the protocol, and this is {VERSION}"
        if request.namespace != self.namespace:
            return "another model, other weights, or another layout of the KV cache"
        if len(request.ticket) > TICKET_BYTES or len(request.namespace) != NAMESPACE_BYTES:
            return "no ticket"
        return ""

    def _found(self, find: Find) -> Reply:
        if error := self._refusal(find):
            return Reply(error=error)
        keys = split(find.keys)
        held = self.tickets.wait(find.ticket, max(0.0, min(find.wait_s, MAX_WAIT_S)))
        return Reply(bytes(held is not None and key in held.places for key in keys))

    def _send_pages(self, connection: socket.socket, ticket: bytes, keys: list[bytes]) -> None:
        held = self.tickets.find(ticket)
        places = held.of(keys) if held is not None else [None] * len(keys)
        send(connection, Reply(bytes(place is not None for place in places)))
        there = [place for place in places if place is not None]
        at_once = max(1, AT_ONCE_BYTES // self._page_bytes)
        for at in range(0, len(there), at_once):
            for page in self._pages(held, there[at : at + at_once]):
                send_page(connection, page)

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
        error = self._refusal(put)
        if not error and not keys:
            error = "no pages"
        if not error and not self.tickets.receive(len(keys)):
            error = f"{len(keys)} pages are more than the buffer has room for (kv_buffer_size)"
        if error:
            send(connection, Reply(error=error))
            return
        try:
            self._receive(connection, put, keys)
        finally:
            self.tickets.received(len(keys))

    def _receive(self, connection: socket.socket, put: Put, keys: list[bytes]) -> None:
        send(connection, Reply())
        pages: dict[bytes, list[int | Page]] = {}
        for key in keys:
            page = np.empty(self._page_bytes, np.uint8)
            if receive_page(connection, page):
                pages.setdefault(key, []).append(page)
        self.tickets.keep(put.ticket, pages, len(keys))
        send(connection, Reply())


@dataclass(slots=True, eq=False)
class Held:
    """What a ticket names. places: numbers of pages of the KV cache, or pages themselves, of one kind all. session, number: the
    scheduler's; -1: it has none."""

    places: dict[bytes, list[int | Page]]
    deadline_ns: int = 0  # monotonic; 0: none
    session: int = 0
    number: int = -1
    num_kept: int = 0  # pages in the buffer

    def of(self, keys: Sequence[bytes]) -> list[int | Page | None]:
        """The place of each entry; a key stands as often as it has pages."""
        seen: dict[bytes, int] = {}
        found: list[int | Page | None] = []
        for key in keys:
            nth = seen[key] = seen.get(key, -1) + 1
            places = self.places.get(key, [])
            found.append(places[nth] if nth < len(places) else None)
        return found


class Tickets:
    """The tickets of one worker, in the order of their coming; every thread's. `buffer_bytes`: what others may send, at most."""

    def __init__(self, page_bytes: int, buffer_bytes: int) -> None:
        self.lock = threading.RLock()
        self._come = threading.Condition(self.lock)
        self._held: OrderedDict[bytes, Held] = OrderedDict()
        self._room = buffer_bytes // page_bytes if page_bytes else 0
        self._num_kept = self._num_coming = 0

    def leave(self, ticket: bytes, held: "Held") -> None:
        """The scheduler has leased these pages."""
        with self._come:
            self._add(ticket, held)

    def keep(self, ticket: bytes, pages: dict[bytes, list[int | Page]], count: int) -> None:
        """Pages that another mesh has sent; those that came first go where there is no room."""
        with self._come:
            while self._num_kept + count > self._room:
                oldest = next(one for one, held in self._held.items() if held.num_kept)
                self._remove(oldest)
            self._num_kept += count
            self._add(ticket, Held(pages, num_kept=count))

    def receive(self, count: int) -> bool:
        """Whether so many pages may be sent now; all that are being sent are no more than the buffer holds."""
        with self.lock:
            may = self._num_coming + count <= self._room
            self._num_coming += count * may
            return may

    def received(self, count: int) -> None:
        """They are here, or do not come."""
        with self.lock:
            self._num_coming -= count

    def wait(self, ticket: bytes, limit_s: float) -> Held | None:
        """What the ticket names, once it comes."""
        with self._come:
            self._come.wait_for(lambda: ticket in self._held, limit_s)
            return self.find(ticket)

    def find(self, ticket: bytes) -> Held | None:
        with self.lock:
            held = self._held.get(ticket)
            if held is not None and 0 < held.deadline_ns <= time.monotonic_ns():
                self._remove(ticket)
                return None
            return held

    def end(self, ticket: bytes) -> "Held | None":
        """What a ticket named that is done with."""
        with self.lock:
            held = self._held.get(ticket)
            if held is not None:
                self._remove(ticket)
            return held

    def reset(self) -> None:
        """The pages of the KV cache are nobody's any more; what others have sent stays."""
        with self.lock:
            for ticket in [one for one, held in self._held.items() if not held.num_kept]:
                self._remove(ticket)

    def clear(self) -> None:
        """Nothing is there any more."""
        with self.lock:
            self._held.clear()
            self._num_kept = 0

    def _add(self, ticket: bytes, held: Held) -> None:
        if ticket in self._held:
            self._remove(ticket)
        self._held[ticket] = held
        self._come.notify_all()

    def _remove(self, ticket: bytes) -> None:
        self._num_kept -= self._held.pop(ticket).num_kept
