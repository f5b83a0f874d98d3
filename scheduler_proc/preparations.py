"""The extras of this rank's requests that its workers prepare (grammars), and which are ready. Pure; owned by core.py.

A request waits for its extras before it gets a row: workers prepare them beside their steps, so nobody else waits. Requests with equal
ones share the preparation. What workers have prepared is forgotten with its last request, and with the workers.
"""

from collections import deque

from meshlm.protocol.edges.step import ExtraReady, PrepareExtra
from meshlm.protocol.extras import Extra
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.events import Send
from meshlm.scheduler_proc.request import Preparation, Request

MAX_ASKED = 16  # preparations that a worker is asked for at once: steps go over the same link


class Preparations:
    """`workers` are all of the rank's, each of which prepares."""

    def __init__(self, workers: list[Identity]) -> None:
        self._workers = workers
        self._by_extra: dict[Extra, Preparation] = {}
        self._by_number: dict[int, Preparation] = {}
        self._unsaid: deque[Preparation] = deque()
        self._unanswered: set[tuple[int, Identity]] = set()
        self._last = 0

    def begin(self) -> None:
        """The workers are new, or begin anew: all is asked again."""
        self._unsaid = deque(self._by_number.values())
        self._unanswered.clear()
        for preparation in self._unsaid:
            preparation.missing = set(self._workers)

    def add(self, request: Request) -> None:
        for extra in request.work.extras:
            if extra.is_prepared:
                preparation = self._by_extra.get(extra) or self._begun(extra)
                preparation.requests.add(request)
                request.preparations.append(preparation)

    def _begun(self, extra: Extra) -> Preparation:
        self._last += 1
        preparation = Preparation(self._last, extra, set(self._workers))
        self._by_extra[extra] = self._by_number[self._last] = preparation
        self._unsaid.append(preparation)
        return preparation

    def remove(self, request: Request) -> None:
        for preparation in request.preparations:
            preparation.requests.discard(request)
            if not preparation.requests:
                del self._by_extra[preparation.extra], self._by_number[preparation.number]

    def messages(self, session: int) -> list[Send]:
        """What is to be said to the workers now, which can be reached."""
        sends = []
        while self._unsaid and len(self._unanswered) < MAX_ASKED * len(self._workers):
            preparation = self._unsaid.popleft()
            if preparation.requests:
                self._unanswered |= {(preparation.number, worker) for worker in self._workers}
                prepare = PrepareExtra(session, preparation.number, preparation.extra)
                sends += [Send(worker, prepare) for worker in self._workers]
        return sends

    def ready(self, worker: Identity, ready: ExtraReady) -> tuple[Request, ...]:
        """A worker answered. The requests that end, where it cannot prepare their extra."""
        self._unanswered.discard((ready.number, worker))
        preparation = self._by_number.get(ready.number)
        if preparation is None:
            return ()
        preparation.missing.discard(worker)
        return tuple(preparation.requests) if ready.failed is not None else ()
