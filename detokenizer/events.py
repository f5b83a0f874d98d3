"""What the core is told and what it answers."""

from array import array

from msgspec import Struct

from meshlm.protocol.ids import Identity, Incarnation
from meshlm.protocol.text_edge import Prompt
from meshlm.runtime.errors import RequestError


class Received(Struct, frozen=True):
    """A message of a peer."""

    sender: Identity
    incarnation: Incarnation
    message: Struct


class Encoded(Struct, frozen=True):
    """A prompt's ids, or why there are none."""

    job: int
    token_ids: "array[int] | None" = None
    error: RequestError | None = None


class PeerUp(Struct, frozen=True):
    identity: Identity
    incarnation: Incarnation


class PeerLost(Struct, frozen=True):
    identity: Identity
    incarnation: Incarnation


class Tick(Struct, frozen=True):
    """Once a second."""

    now: float


Event = Received | Encoded | PeerUp | PeerLost | Tick


class Encode(Struct, frozen=True):
    """Encode this prompt away from the loop and come back with Encoded(job)."""

    job: int
    prompt: Prompt


class Send(Struct, frozen=True):
    """Send `message` to `to`."""

    to: Identity
    message: Struct


Effect = Encode | Send
