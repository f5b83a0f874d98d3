"""The tickets of one worker: pages of its KV cache that the scheduler has leased, and pages that other meshes have sent (server.py)."""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from meshlm.workers.kv.connectors import Page


@dataclass(slots=True, eq=False)
class Held:
    """What a ticket names. places: numbers of pages of the KV cache, or pages themselves, of one kind all. session, number: the
    scheduler's; -1: it has none."""

    places: dict[bytes, list[int | Page]]
    deadline_ns: int = 0  # monotonic; 0: none
    session: int = 0
    number: int = -1
    num_kept: int = 0  # pages in the buffer
    done: set[int] = field(default_factory=set)  # tensor-parallel ranks that read no more of it

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

    def done(self, ticket: bytes, reader: int, readers: Collection[int]) -> "Held | None":
        """A reader of it is done: what the ticket named, once all are."""
        with self.lock:
            held = self._held.get(ticket)
            if held is None:
                return None
            held.done.add(reader)
            return self.end(ticket) if held.done.issuperset(readers) else None

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
