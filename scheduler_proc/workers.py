"""The workers of one scheduler: which can be reached, which have answered, and whether their group must be made anew. Pure.

Owned by core.py.

Several workers (tensor and pipeline parallelism) compute each step together. When one is lost, the others may wait for it inside a
collective; when an earlier scheduler died between sending a plan to one and to the next, likewise. Then they are told to disband.
"""

from meshlm.protocol.edges.step import LastPlan, Reset, ResetGroup, WorkerAsleep, WorkerReady
from meshlm.protocol.lockstep import StepGroup
from meshlm.protocol.sleeping import Sleeping
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.process.events import Send
from meshlm.scheduler_proc.limits import Limits
from meshlm.scheduler_proc.states import RankState, Session


class Workers:
    """`session` is the one that they were last asked to begin; `sleeping` the memory that they are to be without, and `weights` those
    that they are to have, None while this scheduler has not heard it from them. `behind`: why they do not have them."""

    def __init__(self, limits: Limits) -> None:
        first = limits.first_worker
        self.all = [Identity(Role.WORKER, first + index) for index in range(limits.num_workers)]
        self.rank = RankState()
        self.session = 0
        self.sleeping: Sleeping | None = None
        self.weights: WeightsVersion | None = None
        self.behind = ""
        self.have_been_asked = False  # for these weights, in this session
        self._is_welcome = not limits.sleep_mode  # what became of the workers before is known, as far as it is at all
        self._ready: dict[Identity, WorkerReady] = {}
        self._asleep: dict[Identity, WorkerAsleep] = {}
        self._incarnations: dict[Identity, Incarnation] = {}  # of those that can be reached
        self._last_plans: dict[Identity, tuple[int, int]] = {}

    @property
    def asleep(self) -> bool:
        """Whether they are to be without some of their memory."""
        return self.sleeping is not None and bool(self.sleeping.tags)

    @property
    def label(self) -> str:
        """What their weights are called; empty: that is not known yet."""
        return "" if self.weights is None else self.weights.label

    def up(self, worker: Identity, incarnation: Incarnation, now: float) -> list[Send]:
        self._incarnations[worker] = incarnation
        return self.begin(now)

    def begin(self, now: float, group: StepGroup | None = None) -> list[Send]:
        """A new session with all, once all can be reached; they answer WorkerReady.

        Its number is the time: what a worker still says to an earlier incarnation of this scheduler must not pass for an answer to us.
        """
        self.forget()
        self.session = max(self.session + 1, int(now * 1e6))
        if len(self._incarnations) < len(self.all) or not self._is_welcome:
            self.rank.move_session(Session.GATHERING)
            return []
        self.rank.move_session(Session.PREPARING)
        incarnations = tuple(self._incarnations[one] for one in self.all) if len(self.all) > 1 else ()
        self.have_been_asked = self.weights is not None
        reset = Reset(self.session, incarnations, group, self.sleeping, self.weights)
        return [Send(one, reset) for one in self.all]

    def welcome(self, sleeping: Sleeping, now: float) -> list[Send]:
        """The coordinator says how the workers of an earlier incarnation of this scheduler were."""
        if self._is_welcome:
            return []
        self._is_welcome = True
        if sleeping.tags:
            self.sleeping = sleeping
        return self.begin(now)

    def lost(self, worker: Identity, incarnation: Incarnation) -> list[Send]:
        if self._incarnations.get(worker) == incarnation:
            del self._incarnations[worker]
        return self._disband(f"{worker} is lost")

    def forget(self) -> None:
        """Forgets what the workers answered in this session."""
        self._ready.clear()
        self._asleep.clear()
        self._last_plans.clear()

    def _disband(self, reason: str) -> list[Send]:
        self.rank.move_session(Session.GATHERING)
        self.forget()
        return [Send(worker, ResetGroup(reason)) for worker in self._incarnations if len(self.all) > 1]

    def compare_last_plan(self, worker: Identity, last_plan: LastPlan) -> list[Send]:
        """All were sent the same plans, or the group must be made anew."""
        if last_plan.session != self.session:
            return []
        self._last_plans[worker] = (last_plan.of_session, last_plan.step)
        if len(self._last_plans) < len(self.all) or len(set(self._last_plans.values())) == 1:
            return []
        self.session += 1  # what they still answer is for nobody
        return self._disband("its workers were sent different plans")

    def ready(self, worker: Identity, ready: WorkerReady) -> list[WorkerReady]:
        """The facts of all, in their order, when this was the last one to answer."""
        if ready.session != self.session or self.rank.session is not Session.PREPARING:
            return []
        self._ready[worker] = ready
        self._answered()
        return [self._ready[one] for one in self.all] if self.rank.serves else []

    def sleeps(self, worker: Identity, asleep: WorkerAsleep) -> None:
        """A worker sleeps. A scheduler that begins learns here that all are to."""
        if asleep.session == self.session and self.rank.session is Session.PREPARING:
            self._asleep[worker] = asleep
            self.sleeping = self.sleeping or asleep.sleeping
            self._answered()

    def _answered(self) -> None:
        """Moves on once all have. Weights that nobody has asked for are the newest of those that the workers have."""
        if len(self._ready) + len(self._asleep) < len(self.all):
            return
        if self._asleep:
            self.behind = next((one.behind for one in self._asleep.values() if one.behind), "")
            self.rank.move_session(Session.ASLEEP)
            return
        found = self._ready.values()
        wanted = self.weights = self.weights or max((one.weights for one in found), key=lambda one: one.number)
        others = [(worker, one) for worker, one in self._ready.items() if not one.weights.is_same(wanted)]
        why = (f"{worker}: {one.behind or f'it has weights {one.weights.label}'}" for worker, one in others)
        self.behind = next(why, "")
        self.rank.move_session(Session.BEHIND if others else Session.SERVING)
