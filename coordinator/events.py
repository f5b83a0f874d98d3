"""What the core is told and what it answers."""

from msgspec import Struct

from meshlm.protocol.ids import Identity, Incarnation


class Received(Struct, frozen=True):
    """A message of a member."""

    sender: Identity
    incarnation: Incarnation
    message: Struct


class PeerLost(Struct, frozen=True):
    """This life of a member is over."""

    identity: Identity
    incarnation: Incarnation


class Tick(Struct, frozen=True):
    """Once a second; `wall_s` is the wall clock, for deadlines."""

    wall_s: float


Event = Received | PeerLost | Tick


class Send(Struct, frozen=True):
    """Send `message` to `to`."""

    to: Identity
    message: Struct
