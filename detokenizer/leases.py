"""The leases of files of images (protocol/edges/media.py): renewed for the requests of the journal, as long as they are there. Pure."""

from collections.abc import Iterable

from meshlm.detokenizer.request_state import RequestState
from meshlm.detokenizer.states import RequestStatus
from meshlm.protocol.edges.media import RENEW_S, RenewMedia
from meshlm.protocol.edges.text import media_of
from meshlm.protocol.extras import find_extra
from meshlm.protocol.media import Media
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.events import Send

MEDIA = Identity(Role.MEDIA)


def digests_of(request: RequestState) -> frozenset[bytes]:
    """Those of the images in its prompt."""
    media = find_extra(media_of(request.submit.prompt), Media)
    return frozenset(item.digest for item in media.items) if media is not None else frozenset()


class Leases:
    """When they are due."""

    def __init__(self) -> None:
        self._next = 0.0

    def renewed(self, requests: Iterable[RequestState], now: float, *, at_once: bool = False) -> list[Send]:
        """What the media process is told, every RENEW_S seconds. at_once: it is a new one."""
        if now < self._next and not at_once:
            return []
        self._next = now + RENEW_S
        running = (request for request in requests if request.status is not RequestStatus.FINISHED)
        digests = frozenset().union(*map(digests_of, running))
        return [Send(MEDIA, RenewMedia(tuple(sorted(digests))))] if digests else []
