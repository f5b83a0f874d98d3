"""The scheduler's end of a group of ranks that step together: follows the coordinator's orders. Pure; owned by core.py.

A rank has an incarnation: a new one with each session that its workers begin because one of them was lost. An order to prepare
with other members than before begins a session too, in which the workers build communicators for these members; what they computed is
computed again.
"""

from meshlm.protocol.lockstep import JointOrder, JointRank, JointReport, Phase, StepGroup
from meshlm.protocol.wire.ids import COORDINATOR, Epoch, Incarnation
from meshlm.runtime.process.events import Send

# a member that is lost is back within seconds; with a large model its workers load for longer
PATIENCE_NS = 30_000_000_000


class Lockstep:
    """`begin`, `lost` and `prepared` say what became of the workers; `may_step`, `stepped` and `finished` are asked for each step."""

    def __init__(self, depth: int, workers_per_rank: int) -> None:
        self._rank = JointRank(depth)
        self._workers_per_rank = workers_per_rank
        self.incarnation = Incarnation(0)  # 0: the workers are not all there
        self._wanted = self._built = Epoch(0)  # groups: 0 is none
        self._follows = False  # the workers are as the newest order wants them
        self._told: tuple[object, ...] = ()
        self._together_ns = 0  # when all workers had last met; 0: never

    # --- workers ---

    def begin(self, incarnation: int) -> None:
        """The workers begin a session because one of them is new; 0: one cannot be reached yet."""
        self.incarnation = Incarnation(incarnation)
        self._follows = False
        self._built = Epoch(0)

    def lost(self) -> None:
        self.begin(0)

    def prepared(self) -> None:
        """All workers have answered the session that `follow` asked for, or one of their own."""
        if self._wanted == self._built:
            self._follows = True

    def serves(self, together: bool, now_ns: int) -> bool:
        """Whether requests may come here: its workers have met, or did so until just now and will again, so that requests wait where
        they are. Those that have never met, or not for PATIENCE_NS, give no token: their mesh is not ready."""
        if together:
            self._together_ns = now_ns
        return together or bool(self.incarnation and self._together_ns and now_ns - self._together_ns < PATIENCE_NS)

    # --- orders ---

    def follow(self, order: JointOrder) -> bool:
        """Take an order. True: the workers have to begin a session with `group`."""
        before = self._rank.epoch
        self._rank.follow(order)
        self._told = ()  # the coordinator wants to hear
        if self._rank.epoch == before or not self.incarnation:
            return False
        self._wanted = order.group
        self._follows = bool(order.group) and order.group == self._built
        if self._follows:
            return False
        self._built = order.group
        return True

    @property
    def group(self) -> StepGroup | None:
        """The group that the workers shall form: the members of the newest order; None when some are missing."""
        size = len(self._rank.members) * self._workers_per_rank
        return StepGroup(self._built, size) if self._built else None

    def report(self, *, has_work: bool) -> list[Send]:
        """The rank's report, when the coordinator should hear it."""
        rank = self._rank
        rank.has_work = has_work
        at_end = rank.finished if rank.phase >= Phase.DRAIN else 0
        news = (self.incarnation, rank.epoch, rank.phase, self._follows, has_work, at_end)
        if news == self._told:
            return []
        self._told = news
        if self._follows:
            told = JointReport(rank.epoch, rank.phase, rank.step, rank.finished, has_work, self.incarnation)
        else:
            told = JointReport(Epoch(0), Phase.PREPARE, 0, 0, has_work, self.incarnation)
        return [Send(COORDINATOR, told)]

    def tell_again(self) -> None:
        """The next report is due even without change."""
        self._told = ()

    # --- steps ---

    def may_step(self) -> bool:
        """A step may begin, and does, with or without requests."""
        return self._follows and bool(self._built) and self._rank.may_begin()

    def stepped(self) -> None:
        self._rank.begin()

    def finished(self) -> None:
        self._rank.finish(self._rank.epoch)
