"""What schedulers may still compute although nobody waits for it: aborts that may be lost, and handles that are nobody's.

An abort takes the road of its request, through the coordinator, which may die with it unread. So it is said again to the next
coordinator; and tokens that keep coming for a handle of nobody are answered to their scheduler. Owned by attempts.py.
"""

from collections.abc import Container

from meshlm.protocol.wire.ids import RequestId

STRANGER_ROWS = 4  # an abort takes a moment: so many rows of a handle until its scheduler is told, and told again
MAX_REMEMBERED = 4096  # of each kind


class Aborts:
    def __init__(self) -> None:
        self._said: dict[RequestId, None] = {}
        self._rows: dict[int, int] = {}  # of handles that are nobody's

    def add(self, request_ids: tuple[RequestId, ...]) -> None:
        self._said.update(dict.fromkeys(request_ids))
        while len(self._said) > MAX_REMEMBERED:
            del self._said[next(iter(self._said))]

    def to_repeat(self, opened: Container[RequestId]) -> tuple[RequestId, ...]:
        """The aborts that a new incarnation of the coordinator should hear. An id that is open again is not aborted."""
        return tuple(request_id for request_id in self._said if request_id not in opened)

    def stranger(self, handle: int) -> bool:
        """A row came for this handle of nobody; whether its scheduler should be told now."""
        if len(self._rows) > MAX_REMEMBERED:
            self._rows.clear()
        rows = self._rows[handle] = self._rows.get(handle, 0) + 1
        return rows % STRANGER_ROWS == 0
