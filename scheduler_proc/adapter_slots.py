"""The workers' slots for adapters, as a rank's running requests take them: rows of one step have --max-loras adapters at most. Pure.

A request whose adapter finds no slot waits, and others pass it: those without an adapter, and those whose adapter has one. So that it
does not wait for ever where these never end, no other adapter's request begins once it has waited for PATIENCE_S. Owned by batching.py.
"""

from collections import Counter

from meshlm.scheduler_proc.request import Request

PATIENCE_S = 5.0


class AdapterSlots:
    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: Counter[bytes] = Counter()  # running requests, by what they have a slot for
        self._is_reserved = False  # for one that has waited too long, in the plan that is made

    def begin_plan(self) -> None:
        self._is_reserved = False

    def passed(self, request: Request, now_ns: int) -> bool:
        """Whether this waiting request finds no slot now. Asked in the order of the queue."""
        if not request.slot_key or (not self._is_reserved and self.has_room(request)):
            return False
        self._is_reserved = self._is_reserved or now_ns - request.arrived_ns > PATIENCE_S * 1e9
        return True

    def has_room(self, request: Request) -> bool:
        return not request.slot_key or request.slot_key in self._taken or len(self._taken) < self._count

    def take(self, request: Request) -> None:
        """It gets a row."""
        if request.slot_key:
            self._taken[request.slot_key] += 1

    def leave(self, request: Request) -> None:
        """It has a row no more."""
        if request.slot_key:
            self._taken[request.slot_key] -= 1
            if not self._taken[request.slot_key]:
                del self._taken[request.slot_key]

    def check(self, running: list[Request]) -> None:
        """AssertionError when the state contradicts itself."""
        assert self._taken == Counter(request.slot_key for request in running if request.slot_key)
        assert len(self._taken) <= self._count
