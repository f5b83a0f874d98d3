"""The joint-step state machine: ranks that share experts begin, drain and stop together, in epochs that all have acknowledged.

Pure: each method answers with orders for ranks. Owned by core.py; dense ranks never step in lockstep. The ranks' side, and the
messages, are protocol/lockstep.py. What holds:

- a rank is told to step in an epoch only when every member has left all earlier ones, so no two step in different epochs;
- all members end an epoch that is drained with the same step, so none waits in a collective for one that has stopped;
- the loss or return of a member makes a new epoch: what ran is aborted, communicators are built anew.

Transitions of the group: IDLE -work-> STEPPING -no work, or pause-> DRAINING -all stopped-> IDLE or PAUSED; any -a member is
lost-> PAUSED -all are there and prepared-> IDLE; PAUSED -resume-> IDLE.
"""

from collections.abc import Iterable
from enum import Enum

from meshlm.protocol.lockstep import JointOrder, JointReport, Phase
from meshlm.protocol.wire.ids import Epoch, Identity, Incarnation, Role
from meshlm.runtime.process.events import Send, check_transition


class State(Enum):
    IDLE = "idle"
    STEPPING = "stepping"
    DRAINING = "draining"
    PAUSED = "paused"


TRANSITIONS: dict[State, tuple[State, ...]] = {
    State.IDLE: (State.STEPPING, State.PAUSED),
    State.STEPPING: (State.DRAINING, State.PAUSED),
    State.DRAINING: (State.IDLE, State.PAUSED),
    State.PAUSED: (State.IDLE,),
}


class JointGroup:
    """`num_ranks` ranks, all of which are needed. `first_epoch` is larger than any that an earlier coordinator gave."""

    def __init__(self, num_ranks: int, first_epoch: int) -> None:
        self.num_ranks = num_ranks
        self.state = State.PAUSED
        self.reason = "starting"  # while PAUSED
        self.incarnations: dict[int, Incarnation] = {}
        self.reports: dict[int, JointReport] = {}  # the newest of each rank, of its present incarnation
        self.order = JointOrder(Epoch(first_epoch), Phase.PREPARE, ())
        self._pause_reason = ""
        self._heard: set[int] = set()  # ranks that have said how they are

    @property
    def at_rest(self) -> bool:
        """Whether no rank steps. Those of which this coordinator has heard nothing may do so in an epoch of the one before."""
        heard_all = len(self._heard) == self.num_ranks
        return self.state is State.PAUSED and heard_all and all(self._follows(rank) for rank in self.incarnations)

    # --- what happens ---

    def reported(self, scheduler: Identity, report: JointReport) -> list[Send]:
        """A rank whose workers are all there is a member; one that has lost a worker is none until they are."""
        self._heard.add(scheduler.index)
        if not report.incarnation:
            return self.lost(scheduler)
        return self.join(scheduler.index, report.incarnation) + self.report(scheduler.index, report.incarnation, report)

    def lost(self, scheduler: Identity) -> list[Send]:
        incarnation = self.incarnations.get(scheduler.index)
        return [] if incarnation is None else self.lose(scheduler.index, incarnation)

    def join(self, rank: int, incarnation: Incarnation) -> list[Send]:
        """This incarnation of a rank can be reached."""
        before = self.order
        if self.incarnations.get(rank, 0) < incarnation and 0 <= rank < self.num_ranks:
            self.incarnations[rank] = incarnation
            self.reports.pop(rank, None)
            self._new_epoch()
        return self._orders(before)

    def lose(self, rank: int, incarnation: Incarnation) -> list[Send]:
        """This incarnation of a rank is over."""
        before = self.order
        if self.incarnations.get(rank) == incarnation:
            del self.incarnations[rank]
            self.reports.pop(rank, None)
            self._new_epoch()
        return self._orders(before)

    def report(self, rank: int, incarnation: Incarnation, report: JointReport) -> list[Send]:
        """A rank says where it is."""
        known = self.reports.get(rank)
        newer = known is None or _progress(report) >= _progress(known)
        if self.incarnations.get(rank) == incarnation and newer:
            self.reports[rank] = report
        return self._orders(self.order)

    def pause(self, reason: str) -> list[Send]:
        """All ranks end with the same step, and rest until `resume`."""
        self._pause_reason = reason
        return self._orders(self.order)

    def resume(self) -> list[Send]:
        return self.pause("")

    def tick(self) -> list[Send]:
        """Time went on: what may have been lost is said again."""
        return self._advance() or self._tell(rank for rank in self.incarnations if not self._follows(rank))

    def _orders(self, before: JointOrder) -> list[Send]:
        effects = self._advance()
        return effects or ([] if self.order is before else self._tell(self.incarnations))

    # --- members ---

    def _new_epoch(self) -> None:
        """Other members than before: whatever runs is aborted."""
        members = tuple(sorted(self.incarnations.items()))
        missing = [str(rank) for rank in range(self.num_ranks) if rank not in self.incarnations]
        epoch = Epoch(self.order.epoch + 1)
        self.order = JointOrder(epoch, Phase.PREPARE, members, group=Epoch(0) if missing else epoch)
        if self.state is not State.PAUSED:
            self._move(State.PAUSED)
        self.reason = f"rank {', '.join(missing)} is missing" if missing else "members prepare"

    def _follows(self, rank: int) -> bool:
        """Whether the rank has done what the order asks."""
        report, order = self.reports.get(rank), self.order
        if report is None or report.epoch != order.epoch or report.phase is not order.phase:
            return False
        return order.phase is not Phase.STOP or report.finished >= order.stop_at

    # --- transitions ---

    def _advance(self) -> list[Send]:
        """Makes at most one transition, and gives its orders."""
        if len(self.incarnations) < self.num_ranks or not all(self._follows(rank) for rank in self.incarnations):
            return []
        work = any(report.has_work for report in self.reports.values())
        match self.state:
            case State.PAUSED if self._pause_reason:
                self.reason = self._pause_reason
            case State.PAUSED:
                self._move(State.IDLE)
                return self._advance()
            case State.IDLE if self._pause_reason:
                self._rest()
            case State.IDLE if work and self.order.phase is Phase.PREPARE:
                self._move(State.STEPPING)
                return self._next(Phase.STEP)
            case State.IDLE if work:  # the epoch before was drained
                epoch, order = Epoch(self.order.epoch + 1), self.order
                self.order = JointOrder(epoch, Phase.PREPARE, order.members, group=order.group)
                return self._tell(self.incarnations)
            case State.STEPPING if self._pause_reason or not work:
                self._move(State.DRAINING)
                return self._next(Phase.DRAIN)
            case State.DRAINING if self.order.phase is Phase.DRAIN:
                return self._next(Phase.STOP, max(report.step for report in self.reports.values()))
            case State.DRAINING if self._pause_reason:
                self._rest()
            case State.DRAINING:
                self._move(State.IDLE)
                return self._advance()
        return []

    def _rest(self) -> None:
        self._move(State.PAUSED)
        self.reason = self._pause_reason

    def _move(self, state: State) -> None:
        check_transition(TRANSITIONS, self.state, state, f"epoch {self.order.epoch}")
        self.state = state
        self.reason = self.reason if state is State.PAUSED else ""

    def _next(self, phase: Phase, stop_at: int = 0) -> list[Send]:
        self.order = JointOrder(self.order.epoch, phase, self.order.members, stop_at, self.order.group)
        return self._tell(self.incarnations)

    def _tell(self, ranks: Iterable[int]) -> list[Send]:
        return [Send(Identity(Role.SCHEDULER, rank), self.order) for rank in ranks]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self.order.members == tuple(sorted(self.incarnations.items())), "an order for other members"
        phases = {
            State.IDLE: (Phase.PREPARE, Phase.STOP),
            State.STEPPING: (Phase.STEP,),
            State.DRAINING: (Phase.DRAIN, Phase.STOP),
            State.PAUSED: (Phase.PREPARE, Phase.STOP),
        }
        assert self.order.phase in phases[self.state], f"{self.state.value} in phase {self.order.phase.name}"
        assert self.state is State.PAUSED or len(self.incarnations) == self.num_ranks, "not all are there"
        assert bool(self.reason) == (self.state is State.PAUSED), "paused, and nobody knows why"


def _progress(report: JointReport) -> tuple[int, int, int, int]:
    return (report.epoch, report.phase, report.finished, report.step)
