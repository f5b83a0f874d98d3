"""What the core is told and what it answers, beside the events of all processes (runtime/process/events.py)."""

from array import array

from msgspec import Struct

from meshlm.protocol.edges.text import Prompt
from meshlm.protocol.extras import Extras
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send, Tick


class Truncation(Struct, frozen=True):
    """How much of a text stays, with the tokens around it: models for vectors read from those, so they are not cut off."""

    keep: int
    side: str  # that is cut


class Encoded(Struct, frozen=True):
    """A prompt's ids, those of words that may not come and what travels with it, prepared; or why there are none."""

    job: int
    token_ids: "array[int] | None" = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    extras: Extras = ()
    error: RequestError | None = None


Event = Received | Encoded | PeerUp | PeerLost | Tick


class Encode(Struct, frozen=True):
    """Encode this prompt away from the loop and come back with Encoded(job)."""

    job: int
    prompt: Prompt
    bad_words: tuple[str, ...] = ()
    extras: Extras = ()
    truncation: Truncation | None = None
    name: str = ""  # of the request
    suspect: bool = False  # see Submit


Effect = Encode | Send
