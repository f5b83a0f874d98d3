"""worker <-> worker of another mesh: pages of a prompt's KV, over a TCP connection of their own.

A frame is its length (4 bytes, big-endian) and a msgpack message of `Request` or `Reply`. Where a reply or a Put has pages, their bytes
follow the frame: each page, then its CRC-32 (4 bytes), since they cross a host. A *ticket* names what a finished request has left;
whoever knows it may read these pages, and no others. A key stands as often as it has pages.

Where the meshes have another -tp, a page on the wire is the heads that both sides have (workers/kv/remote/slices.py): Hello tells how
many workers there are, and each says who it is.
"""

from msgspec import Struct

VERSION = 2
TICKET_BYTES = 32
MAX_FRAME_BYTES = 16 << 20  # of keys: half a million
SUM_BYTES = 4


class Hello(Struct, frozen=True, tag="hello"):
    """How many tensor-parallel ranks and stages has this mesh?"""

    version: int


class Find(Struct, frozen=True, tag="find"):
    """Which of these keys are there under the ticket? The answer may take `wait_s`, until the ticket comes."""

    version: int
    namespace: bytes
    ticket: bytes
    keys: bytes
    wait_s: float


class Read(Struct, frozen=True, tag="read"):
    """Send these pages, as far as this tensor-parallel rank has heads of them."""

    ticket: bytes
    keys: bytes
    tp_size: int
    tp_rank: int


class Put(Struct, frozen=True, tag="put"):
    """Keep these pages, whose bytes follow, until somebody here asks for them: the heads that this tensor-parallel rank has of them."""

    version: int
    namespace: bytes
    ticket: bytes
    keys: bytes
    tp_size: int
    tp_rank: int


class Done(Struct, frozen=True, tag="done"):
    """This tensor-parallel rank reads nothing of this ticket any more."""

    ticket: bytes
    tp_size: int
    tp_rank: int


Request = Hello | Find | Read | Put | Done


class Reply(Struct, frozen=True, tag="reply", omit_defaults=True):
    """The answer to every request: by key 1 where it is there (to Read: where its page follows). error: why nothing is."""

    found: bytes = b""
    error: str = ""
    tp_size: int = 0  # to Hello
    pp_size: int = 0
