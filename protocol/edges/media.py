"""frontend <-> media process, and detokenizer -> media process: files of clients go in, items of a prompt come out (docs/media.md).

The tensors of an item never travel: they lie in a file of the host's shared memory, which the media process alone makes and removes.
A file stays while somebody holds it: a frontend from its ReadMedia to its ReleaseMedia, a detokenizer for requests whose client is
away. Holders say every RENEW_S what they hold; what is not said for LEASE_S is held no longer, so what dies leaves nothing behind.
"""

from msgspec import Struct

from meshlm.protocol.media import MediaItem, Modality
from meshlm.protocol.wire.ids import ErrorKind, Handle

LEASE_S = 60.0
RENEW_S = 10.0


class MediaSource(Struct, frozen=True, omit_defaults=True):
    """One image, video or clip as a client gives it: its bytes, or where they are; or neither, and what it was called before."""

    modality: Modality
    where: str  # the client's path to it: messages[0].content[1].image_url
    param: str  # the client's field
    data: bytes = b""
    url: str = ""  # http, https, file
    uuid: str = ""  # the client's name for it, with what keeps others' apart
    processor_kwargs_json: bytes = b""  # the request's own mm_processor_kwargs


class ReadMedia(Struct, frozen=True, tag="read_media"):
    """Make items of these, and keep their files."""

    handle: Handle
    sources: tuple[MediaSource, ...]


class ReleaseMedia(Struct, frozen=True, tag="release_media"):
    """Nobody waits for the answer, or needs its files, any more."""

    handle: Handle


class Hold(Struct, frozen=True, array_like=True):
    """The files that one ReadMedia, or one request of a detokenizer, needs."""

    handle: Handle
    digests: tuple[bytes, ...] = ()  # none: the answer has not come, and what it brings is held


class HoldMedia(Struct, frozen=True, tag="hold_media", omit_defaults=True):
    """All that the sender holds of the handles behind `after` up to `through`: it holds no other there."""

    holds: tuple[Hold, ...]
    after: int = 0
    through: int = 0
    others: tuple[
        bytes, ...
    ] = ()  # files that others hold for requests of the sender, which is to know when they are gone


FrontendToMedia = ReadMedia | ReleaseMedia | HoldMedia


class MediaRead(Struct, frozen=True, tag="media_read", omit_defaults=True):
    """The answer: an item for each source, in their order; or why there are none."""

    handle: Handle
    items: tuple[MediaItem, ...] = ()
    kind: ErrorKind = ErrorKind.INVALID  # with an error
    error: str = ""
    param: str = ""


MediaToFrontend = MediaRead


DetokenizerToMedia = HoldMedia


class MediaGone(Struct, frozen=True, tag="media_gone"):
    """The answer to HoldMedia where the files of these are not there: what needs them again fails."""

    digests: tuple[bytes, ...]


MediaToDetokenizer = MediaGone
