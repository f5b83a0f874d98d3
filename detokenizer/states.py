"""What a request of the journal can be, and what may follow.

A request is ENCODING until its prompt has become tokens, and its extras are prepared. Then an attempt begins: it is UNASKED while
there is no coordinator to ask for a rank, and ASKED from its Admit on. The coordinator's Routed makes it ROUTED: a scheduler has it, as
far as the coordinator knows. With the attempt's first token it is HEARD, be it routed by then or not: its scheduler has it for certain.

Every attempt may end before its request does, when its scheduler dies or cannot be reached, when a rank gives it back, or when a
coordinator that was asked dies without an answer. Then the next one begins, UNASKED or ASKED, under a handle of its own. The death of a
coordinator ends no attempt that was heard, and one that was routed is named to the next coordinator and stays ROUTED.

A request ends in any of these states: with its last token, a stop string, an error, or at once when the tokens that it came with are
all that it may have. Without an Idempotency-Key it is forgotten then. With one it is FINISHED, and kept for a client that comes back.
Whether a client is there is no state of these: it may leave and come back in each of them (keyed.py).
"""

from enum import Enum


class RequestStatus(Enum):
    ENCODING = "encoding"
    UNASKED = "unasked"
    ASKED = "asked"
    ROUTED = "routed"
    HEARD = "heard"
    FINISHED = "finished"


_NEXT_ATTEMPT = (RequestStatus.UNASKED, RequestStatus.ASKED)
TRANSITIONS: dict[RequestStatus, tuple[RequestStatus, ...]] = {
    RequestStatus.ENCODING: _NEXT_ATTEMPT,
    RequestStatus.UNASKED: (*_NEXT_ATTEMPT, RequestStatus.FINISHED),
    RequestStatus.ASKED: (*_NEXT_ATTEMPT, RequestStatus.ROUTED, RequestStatus.HEARD, RequestStatus.FINISHED),
    RequestStatus.ROUTED: (*_NEXT_ATTEMPT, RequestStatus.ROUTED, RequestStatus.HEARD, RequestStatus.FINISHED),
    RequestStatus.HEARD: (*_NEXT_ATTEMPT, RequestStatus.HEARD, RequestStatus.FINISHED),
    RequestStatus.FINISHED: (),
}
IN_ATTEMPT = (RequestStatus.UNASKED, RequestStatus.ASKED, RequestStatus.ROUTED, RequestStatus.HEARD)
