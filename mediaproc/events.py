"""What the core is told and what it answers, beside the events of all processes (runtime/process/events.py)."""

from msgspec import Struct

from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.media import MediaItem
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick


class Refusal(Struct, frozen=True):
    """Why there is no item; the text is the end of a sentence about it."""

    text: str
    kind: ErrorKind = ErrorKind.INVALID


TOO_LARGE = Refusal("takes more shared memory than all media together may (--mm-processor-cache-gb)")


class Found(Struct, frozen=True):
    """The files of earlier incarnations: digest and bytes of each."""

    files: tuple[tuple[bytes, int], ...]


class Gathered(Struct, frozen=True):
    """A source's bytes, and their digest with what the processor is told."""

    job: int
    data: bytes = b""
    key: bytes = b""
    refusal: Refusal | None = None


class Made(Struct, frozen=True):
    """An item, whose tensors lie in the file `part` of so many bytes."""

    job: int
    item: MediaItem | None = None
    num_bytes: int = 0
    part: str = ""
    refusal: Refusal | None = None


class Listed(Struct, frozen=True):
    """The files that are there: those of any other digest have vanished."""

    digests: frozenset[bytes]


class Gather(Struct, frozen=True):
    """Get the bytes of this source, and come back with Gathered(job)."""

    job: int
    source: MediaSource


class Make(Struct, frozen=True):
    """Have an item made of these bytes, and come back with Made(job)."""

    job: int
    source: MediaSource  # without its bytes
    data: bytes


class Skipped(Struct, frozen=True):
    """Nobody waited for it any more when its turn came, so it was not done."""

    effect: Gather | Make


class Keep(Struct, frozen=True):
    """The file `part` is that of this digest from now on."""

    part: str
    digest: bytes


class Drop(Struct, frozen=True):
    """Nobody wants this file."""

    name: str


Event = Received | PeerLost | Found | Listed | Gathered | Made | Skipped | Tick
Effect = Send | Gather | Make | Keep | Drop
