"""Places requests at detokenizers, and keeps those that wait while none is there, or none has room. Owned by client.py.

After the first refusal for want of room, as many are sent as end, and one now and then.
"""

import contextlib
from collections import deque
from typing import Protocol

from meshlm.protocol.edges.text import Detokenize, Submit, Tokenize
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong
from meshlm.runtime.mesh.mesh import Mesh

LOOK_AGAIN_S = 0.1

Message = Submit | Tokenize | Detokenize


class Holder(Protocol):
    """The side that waits for the answers (client.py)."""

    mesh: Mesh | None

    def has(self, message: Message, peer: Identity | None) -> None: ...
    def wants(self, message: Message) -> bool: ...
    def too_long(self, message: Message, peer: Identity, text: str) -> None: ...


class Placing:
    """Messages of one client, first come, first placed; detokenizers take turns."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._waiting: deque[Message] = deque()
        self._turn = 0
        self._room: int | None = None  # so many may be sent; None: any number
        self._timer_runs = False

    def place(self, message: Message) -> None:
        """Send it, or have it wait behind what waits already."""
        if not self._waiting and self._took(message):
            return
        self._wait(message)

    def refused(self, message: Message) -> None:
        """There was no room for it in the mesh."""
        self._room = 0
        self._wait(message)

    def ended(self) -> None:
        """One of those that were sent: that leaves room."""
        if self._room is not None:
            self._room += 1
            self.look_again()

    def _wait(self, message: Message) -> None:
        self._holder.has(message, None)
        self._waiting.append(message)
        self._look_later()

    def look_again(self) -> None:
        """Send what waits, as far as it is taken."""
        while self._waiting:
            message = self._waiting[0]
            if self._holder.wants(message) and not self._took(message):
                self._look_later()
                return
            self._waiting.popleft()

    def _look_later(self) -> None:
        if not self._timer_runs:
            self._timer_runs = True
            self._mesh().call_later(LOOK_AGAIN_S, self._timer)

    def _timer(self) -> None:
        self._timer_runs = False
        self._room = max(1, self._room) if self._room is not None else None
        self.look_again()

    def _took(self, message: Message) -> bool:
        """Whether a detokenizer has it now. Its answer may come at once."""
        if self._room == 0:
            return False
        mesh = self._mesh()
        peers = mesh.peers(Role.DETOKENIZER)
        for _ in peers:
            self._turn += 1
            peer = peers[self._turn % len(peers)]
            self._holder.has(message, peer)
            with contextlib.suppress(LinkDown, LinkFull):
                try:
                    mesh.send(peer, message)
                except MessageTooLong as error:
                    self._holder.too_long(message, peer, str(error))
                    return True
                if self._room is not None:
                    self._room -= 1
                return True
        self._holder.has(message, None)
        return False

    def _mesh(self) -> Mesh:
        assert self._holder.mesh is not None
        return self._holder.mesh
