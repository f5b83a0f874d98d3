"""The records that the store of responses takes and gives. sqlite3 is not imported here: it is loaded with the file."""

from msgspec import Struct


class Stored(Struct, frozen=True, kw_only=True):
    """One response. `answer` and `items` are JSON: the response as clients read it, and its input; `request` is the body of one in the
    background."""

    id: str
    key: str
    status: str
    background: bool
    created: int
    previous: str
    answer: bytes
    items: bytes
    request: bytes = b""
    salt: str = ""
    holder: str = ""
    lease: float | None = None  # of one that is not ended, in seconds of the wall clock
    tokens: int = 0  # of the output, that its events tell
    next_event: int = 0
    attempts: int = 0


class Chunk(Struct, frozen=True):
    """Events that follow one another, as they are sent; `first` is the number of the first."""

    first: int
    count: int
    data: bytes


class Written(Struct, frozen=True):
    """The part of a response that its holder has made since it wrote the last time. `status` and `answer` tell its end."""

    id: str
    chunk: Chunk | None
    tokens: int
    next_event: int
    status: str = "in_progress"
    answer: bytes = b""


CONVERSATION = "conv_"  # names of conversations begin so: what a response goes on from may be one


class Conversation(Struct, frozen=True):
    """One conversation without its items. `metadata` is JSON."""

    id: str
    key: str
    created: int
    metadata: bytes
