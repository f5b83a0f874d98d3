"""Knows the incarnations of detokenizers that can be reached, and the requests that wait until theirs can: tokens would be lost before.

Called by core.py. Pure. Knows nothing of requests that were taken in.
"""

from collections.abc import Collection
from enum import Enum, auto

from meshlm.protocol.edges.admit import Assign
from meshlm.protocol.wire.ids import Identity, Incarnation, RequestId


class Reach(Enum):
    """Whether the detokenizer that a request is for can be reached."""

    HERE = auto()
    NOT_YET = auto()  # the request is kept
    GONE = auto()  # that incarnation is over, and the next one admits the request again


class Detokenizers:
    """The detokenizers that can be reached, and the requests that wait for others."""

    def __init__(self) -> None:
        self._objects: dict[Identity, Identity] = {}  # one object each, so that `is` compares them
        self._incarnations: dict[Identity, Incarnation] = {}
        self._early: list[Assign] = []

    def one_object(self, identity: Identity) -> Identity:
        return self._objects.setdefault(identity, identity)

    def reach_of(self, assign: Assign) -> Reach:
        """Says whether the request's detokenizer is here; keeps the request where it is not here yet."""
        incarnation = self._incarnations.get(assign.detokenizer, 0)
        if incarnation == assign.incarnation:
            return Reach.HERE
        if incarnation > assign.incarnation:
            return Reach.GONE
        self._early.append(assign)
        return Reach.NOT_YET

    def up(self, identity: Identity, incarnation: Incarnation) -> list[Assign]:
        """A detokenizer can be reached: the requests that waited, for it or others, are to be met again."""
        self._incarnations[identity] = incarnation
        early, self._early = self._early, []
        return early

    def lost(self, identity: Identity, incarnation: Incarnation) -> None:
        if self._incarnations.get(identity) == incarnation:
            del self._incarnations[identity]

    def take_early(self, request_ids: Collection[RequestId] | None = None) -> list[Assign]:
        """Takes out, of these requests or of all, those that wait for their detokenizer."""
        early, self._early = self._early, []
        taken: list[Assign] = []
        for one in early:
            (taken if request_ids is None or one.work.request_id in request_ids else self._early).append(one)
        return taken
