"""Knows the incarnations of the coordinator and the schedulers that are over, as far as this detokenizer has heard. Owned by
attempts.py.

Links have no order among each other: the coordinator may still send a request to a scheduler whose death is known here.
"""

from meshlm.protocol.edges.admit import SchedulerIncarnation
from meshlm.protocol.wire.ids import Identity, Incarnation, Role


class Incarnations:
    """Fed with every PeerUp and PeerLost."""

    def __init__(self) -> None:
        self.coordinator = Incarnation(0)  # the one that can be reached; 0: none
        self.ended: tuple[SchedulerIncarnation, ...] = ()  # the last that is over, of each scheduler that has died
        self._first: dict[Identity, Incarnation] = {}  # scheduler -> the incarnations before this one are over

    def up(self, identity: Identity, incarnation: Incarnation) -> None:
        if identity.role is Role.COORDINATOR:
            self.coordinator = incarnation
        elif identity.role is Role.SCHEDULER:
            self._first[identity] = incarnation
            self.ended = tuple(x for x in self.ended if x.scheduler != identity or x.incarnation < incarnation)

    def lost(self, identity: Identity, incarnation: Incarnation) -> None:
        if identity.role is Role.COORDINATOR and incarnation == self.coordinator:
            self.coordinator = Incarnation(0)
        elif identity.role is Role.SCHEDULER:
            self._first[identity] = Incarnation(max(self._first.get(identity, 0), incarnation + 1))
            others = tuple(incarnation for incarnation in self.ended if incarnation.scheduler != identity)
            self.ended = (*others, SchedulerIncarnation(identity, Incarnation(self._first[identity] - 1)))

    def over(self, scheduler: Identity, incarnation: Incarnation) -> bool:
        """Whether this incarnation of a scheduler has ended."""
        return incarnation < self._first.get(scheduler, 0)
