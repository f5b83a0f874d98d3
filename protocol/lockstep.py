"""The rules of a rank that steps jointly with others because they share experts; what it and the coordinator say to each other, and
what the workers of all ranks agree on before each step.

Pure. Dense models never step in lockstep. The coordinator's side is coordinator/joint.py, the schedulers' scheduler_proc/lockstep.py,
the workers' workers/distributed/lockstep.py.

Orders are totally ordered by (epoch, phase); a rank follows the newest that it has seen and answers each with a report, so lost,
late and repeated messages do no harm. A rank steps in an epoch only after all its members have left the epochs before.
"""

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

from meshlm.protocol.wire.ids import Epoch, Incarnation


class Phase(IntEnum):
    """The phases of an epoch, in this order."""

    PREPARE = 0  # stop at once what runs in earlier epochs; build communicators for these members
    STEP = 1  # step, with an empty batch where there is nothing to do
    DRAIN = 2  # begin no further step, say which was the last
    STOP = 3  # go on to step `stop_at`, so that all end with the same, and rest


class JointOrder(Struct, frozen=True, tag="joint_order"):
    """coordinator -> rank, again until its report says that it is followed."""

    epoch: Epoch
    phase: Phase
    members: tuple[tuple[int, Incarnation], ...]  # rank, incarnation
    stop_at: int = 0
    group: Epoch = Epoch(0)  # in which these members' communicators are built; 0: not all are there, and none are


class JointReport(Struct, frozen=True, tag="joint_report"):
    """rank -> coordinator: on each order, when `has_work` changes, and every second."""

    epoch: Epoch
    phase: Phase
    step: int  # begun in this epoch
    finished: int  # of those, finished
    has_work: bool
    # of the rank: new whenever one of its workers was lost; 0: they are not all there
    incarnation: Incarnation = Incarnation(0)


class JointRank:
    """One incarnation of a rank. Whoever steps asks `may_begin`, then calls `begin` and, after the collectives, `finish`.

    depth: steps that may have begun and not finished."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.epoch = Epoch(0)
        self.phase = Phase.PREPARE
        self.members: tuple[tuple[int, Incarnation], ...] = ()
        self.step = self.finished = self.stop_at = 0
        self.has_work = False

    def follow(self, order: JointOrder) -> JointReport:
        """Take an order, if it is newer than what is followed. A step of an earlier epoch that has not finished is aborted."""
        if order.phase is Phase.PREPARE and order.epoch > self.epoch:
            self.epoch, self.phase, self.members = order.epoch, order.phase, order.members
            self.step = self.finished = 0
        elif order.epoch == self.epoch and order.phase > self.phase:
            self.phase, self.stop_at = order.phase, order.stop_at
        return self.report()

    def report(self) -> JointReport:
        return JointReport(self.epoch, self.phase, self.step, self.finished, self.has_work)

    def may_begin(self) -> bool:
        """Whether the next step may begin; a step that others will not take part in may not."""
        if self.step - self.finished >= self.depth:
            return False
        return self.phase is Phase.STEP or (self.phase is Phase.STOP and self.step < self.stop_at)

    def begin(self) -> int:
        """The number of the step that begins."""
        assert self.may_begin()
        self.step += 1
        return self.step

    def finish(self, epoch: Epoch) -> bool:
        """The step that ran in `epoch` is over; False: it was aborted meanwhile and means nothing."""
        if epoch != self.epoch or self.finished == self.step:
            return False
        self.finished += 1
        return True


class StepGroup(Struct, frozen=True):
    """scheduler -> worker, within Reset: the workers of all ranks that step together from now on."""

    epoch: Epoch
    num_workers: int


class StepAgreement(Struct, frozen=True):
    """The step that a worker proposes, and the one that all of them then do.

    An elementwise maximum, so one all-reduce of a few integers finds it (`columns`)."""

    step: int  # of the group: all are at the same
    num_tokens: int  # padded: as many as the largest has
    graph: bool  # a CUDA graph is replayed, if all can
    micro_batches: bool  # the step is split in two, if all can
    uniform: bool = True  # nobody has more than one token of a request: the graph is one of decodes
    num_requests: int = 0  # of the one that has the most, for a graph's size
    fewest_tokens: int = 0  # of the one that has the fewest: a half of its step must not be empty
    rebalance: bool = False  # experts move before it, if all were asked to move them

    def columns(self) -> tuple[int, ...]:
        """The values in the order in which `of` reads them."""
        refused = (not self.graph, not self.micro_batches, not self.uniform, not self.rebalance)
        return self.step, -self.step, self.num_tokens, *refused, self.num_requests, -self.fewest_tokens

    @classmethod
    def of(cls, columns: Iterable[tuple[int, ...]]) -> "StepAgreement":
        """Out of those of all workers. ValueError: they are not at the same step."""
        largest = (max(column) for column in zip(*columns, strict=True))
        last, first, num_tokens, eager, whole, mixed, stay, num_requests, fewest = largest
        if last != -first:
            raise ValueError(f"a group is at step {-first} and at step {last}")
        return cls(last, num_tokens, not eager, not whole, not mixed, num_requests, -fewest, not stay)
