"""Whether frontends refuse new requests at the door, since the mesh's queue is full. Pure; owned by core.py.

A request that is refused here has cost its frontend a parse, its detokenizer an encoding and four processes a message. Under a load
of ten times what the mesh can take that is most of the work there is, so the frontends are told, and refuse by the head of a request.
"""

PAUSE_S = 0.01  # between two closings: a queue at its limit changes its state with each request that ends
LOOK_S = 0.005  # between two looks at all ranks while it is closed


class QueueGate:
    """`shut` is what frontends have been told."""

    def __init__(self) -> None:
        self.shut = False
        self._shut_at = self._looked_at = float("-inf")

    def refused(self, now: float) -> bool:
        """A request found the queue full. Whether to tell the frontends."""
        if self.shut or now - self._shut_at < PAUSE_S:
            return False
        self.shut, self._shut_at, self._looked_at = True, now, now
        return True

    def due(self, now: float) -> bool:
        """Whether it is time to look for room."""
        if not self.shut or now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        return True

    def open(self) -> None:
        self.shut = False
