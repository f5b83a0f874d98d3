"""The coordinator's end of a group of ranks that step together: takes reports, gives orders. Owned by core.py."""

from meshlm.coordinator.joint import Event, Joined, JointGroup, Lost, Pause, Reported, State, Tick
from meshlm.protocol.lockstep import JointReport
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.events import Send


class Lockstep:
    """All ranks of the mesh are its members. `first_epoch` is larger than any that an earlier coordinator gave."""

    def __init__(self, num_ranks: int, first_epoch: int) -> None:
        self.group = JointGroup(num_ranks, first_epoch)

    def reported(self, scheduler: Identity, report: JointReport) -> list[Send]:
        """A rank whose workers are all there is a member; one that has lost a worker is none until they are."""
        if not report.incarnation:
            return self.lost(scheduler)
        rank = scheduler.index
        return self._do(Joined(rank, report.incarnation)) + self._do(Reported(rank, report.incarnation, report))

    def lost(self, scheduler: Identity) -> list[Send]:
        incarnation = self.group.incarnations.get(scheduler.index)
        return [] if incarnation is None else self._do(Lost(scheduler.index, incarnation))

    def pause(self, reason: str) -> list[Send]:
        """Has all ranks end with the same step, and rest."""
        return self._do(Pause(reason))

    @property
    def at_rest(self) -> bool:
        """Whether no rank steps."""
        return self.group.state is State.PAUSED

    def tick(self) -> list[Send]:
        return self._do(Tick())

    def _do(self, event: Event) -> list[Send]:
        return [Send(Identity(Role.SCHEDULER, tell.rank), tell.order) for tell in self.group.handle(event)]
