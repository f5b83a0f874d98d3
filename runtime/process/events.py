"""The events that every process tells its core, of its links and its clock, and Send, the effect that all cores have.

A core adds events and effects of its own beside these (detokenizer/events.py, say), and answers with them (handle(event, now)).
"""

from msgspec import Struct

from meshlm.protocol.wire.ids import Identity, Incarnation


class Received(Struct, frozen=True):
    """A message of a peer."""

    sender: Identity
    incarnation: Incarnation
    message: Struct


class PeerUp(Struct, frozen=True):
    """A session with this incarnation of a peer begins."""

    identity: Identity
    incarnation: Incarnation


class PeerLost(Struct, frozen=True):
    """This incarnation of a peer is over."""

    identity: Identity
    incarnation: Incarnation
    in_hand: tuple[str, ...] = ()  # the requests that it died with in hand, as far as it is known


class Tick(Struct, frozen=True):
    """It comes once a second; `wall_s` is the wall clock, for deadlines."""

    wall_s: float


Event = Received | PeerUp | PeerLost | Tick


class Send(Struct, frozen=True):
    """Send `message` to `to`."""

    to: Identity
    message: Struct
