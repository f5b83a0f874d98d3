"""Notes what this process does while somebody wants to know (`meshlm trace`): a ring of limited length, filled by any thread.

Where nothing is recorded a noted moment costs one look at `on`.
"""

import os
import time
from collections import deque

from meshlm.protocol.timeline import Span, TimelinePart
from meshlm.protocol.wire.ids import Identity

MAX_SPANS = 50_000  # about 4 MB as a message


class Timeline:
    """Owned by mesh.py; `on` is read before anything is put together for it."""

    def __init__(self, process: Identity) -> None:
        self.on = False
        self._process = process
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._number = self._num_noted = 0

    def begin(self, number: int) -> None:
        self._spans.clear()
        self._number, self._num_noted, self.on = number, 0, True

    def note(
        self,
        name: str,
        track: str,
        begin_ns: int,
        end_ns: int = 0,
        flow: int = 0,
        facts: dict[str, str | int] | None = None,
    ) -> None:
        """Something began then, and ends now or then."""
        self._num_noted += 1
        self._spans.append(Span(name, track, begin_ns, end_ns or time.monotonic_ns(), flow, facts or {}))

    def end(self, number: int) -> TimelinePart | None:
        """What was noted; None where a newer recording has begun."""
        if number != self._number or not self.on:
            return None
        self.on = False
        spans = tuple(self._spans)
        self._spans.clear()
        offset_ns = time.time_ns() - time.monotonic_ns()
        lost = self._num_noted - len(spans)
        return TimelinePart(number, self._process, os.getpid(), offset_ns, spans, lost)
