"""The files of images that requests of the journal need (protocol/edges/media.py). Pure.

The client that asked for a request holds its files. Those of a request whose client is away are held here.
"""

from collections.abc import Iterable

from meshlm.detokenizer.journal import Journal
from meshlm.detokenizer.request_state import RequestState
from meshlm.detokenizer.states import RequestStatus
from meshlm.protocol.edges.media import RENEW_S, Hold
from meshlm.protocol.edges.text import media_of
from meshlm.protocol.extras import find_extra
from meshlm.protocol.media import Media
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.mesh.media_holds import hold_messages
from meshlm.runtime.process.events import Send

MEDIA = Identity(Role.MEDIA)
LAST_HANDLE = 0x7FFF_FFFF


def digests_of(request: RequestState) -> frozenset[bytes]:
    """Those of the images in its prompt."""
    media = find_extra(media_of(request.submit.prompt), Media)
    return frozenset(item.digest for item in media.items) if media is not None else frozenset()


class Leases:
    """What is held, and when it is due to be said."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._next = 0.0
        self._said: list[Hold] = []

    def said(self, now: float, *, at_once: bool = False) -> list[Send]:
        """What the media process is told: what is held, when that has changed, and every RENEW_S seconds. at_once: it is a new one."""
        holds = self._holds()
        due = at_once or now >= self._next
        if holds == self._said and not due:
            return []
        had, self._said = self._said, holds
        others: frozenset[bytes] = frozenset()
        if due:
            self._next = now + RENEW_S
            others = frozenset().union(*map(digests_of, _running(self._journal.by_id.values())))
        if not (holds or had or others):
            return []
        return [Send(MEDIA, message) for message in hold_messages(holds, LAST_HANDLE, sorted(others))]

    def _holds(self) -> list[Hold]:
        """Those of requests that run without a client, and have images."""
        away = _running(self._journal.by_id[request_id] for request_id in self._journal.keyed.until)
        found = ((request.handle, digests_of(request)) for request in away)
        return [Hold(handle, tuple(sorted(digests))) for handle, digests in found if digests]


def _running(requests: Iterable[RequestState]) -> Iterable[RequestState]:
    return (request for request in requests if request.status is not RequestStatus.FINISHED)
