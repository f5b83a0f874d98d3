"""frontend <-> media process, and detokenizer -> media process: files of clients go in, items of a prompt come out (docs/media.md).

The tensors of an item never travel: they lie in a file of the host's shared memory, which the media process alone makes and removes.
A file has a lease: LEASE_S from when a frontend is told of it, and again from each RenewMedia of a detokenizer whose request has it.
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


class CancelMedia(Struct, frozen=True, tag="cancel_media"):
    """Nobody waits for the answer any more."""

    handle: Handle


FrontendToMedia = ReadMedia | CancelMedia


class MediaRead(Struct, frozen=True, tag="media_read", omit_defaults=True):
    """The answer: an item for each source, in their order; or why there are none."""

    handle: Handle
    items: tuple[MediaItem, ...] = ()
    kind: ErrorKind = ErrorKind.INVALID  # with an error
    error: str = ""
    param: str = ""


MediaToFrontend = MediaRead


class RenewMedia(Struct, frozen=True, tag="renew_media"):
    """Requests of this detokenizer have the files of these items."""

    digests: tuple[bytes, ...]


DetokenizerToMedia = RenewMedia


class MediaGone(Struct, frozen=True, tag="media_gone"):
    """The answer to RenewMedia where the files of these are not there: what needs them again fails."""

    digests: tuple[bytes, ...]


MediaToDetokenizer = MediaGone
