"""Which requests an operator ends: all of a rank, or some by their names. Pure; called by core.py."""

import re
from collections.abc import Collection

from meshlm.protocol.operations import AbortRunning, Pause
from meshlm.protocol.wire.ids import RequestId

# A name in the mesh: its client's, what makes it unique, the choice's number, and what makes a later attempt unique.
PARTS = re.compile(r"(.*?)(?:-[0-9a-f]{8})?-\d+(?:-[0-9a-f]{10,}-\d+)?")
PREFIXES = ("cmpl-", "chatcmpl-")


def ended_by(action: Pause | AbortRunning, request_ids: Collection[RequestId]) -> list[RequestId]:
    """The requests that the action ends."""
    if isinstance(action, Pause):
        return list(request_ids) if action.abort else []
    names = set(action.request_ids)
    return [request_id for request_id in request_ids if not names or names & _names(request_id)]


def _names(request_id: RequestId) -> set[str]:
    """What a client may call the request: its answer's id, or the X-Request-Id that is in it."""
    parts = PARTS.fullmatch(request_id)
    name = request_id if parts is None else parts[1]
    return {request_id, name, *(name.removeprefix(prefix) for prefix in PREFIXES)}
