"""What the tests of a Mesh by itself share."""

from msgspec import Struct

from meshlm.protocol.wire.ids import Identity, Incarnation

LIMIT_S = 10


class Deaf:
    """An App that nobody tells anything."""

    def on_message(self, peer: Identity, message: Struct) -> None: ...
    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None: ...
    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None: ...
    def flush(self) -> None: ...
