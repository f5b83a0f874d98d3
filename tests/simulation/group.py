"""Workers of tensor- and pipeline-parallel groups: the real WorkerApp and Membership, with simulated threads, store and device.

A stage's ranks compute each step together, after the stage before. A rank whose peer is gone waits for ever, as inside a
collective on a GPU, or sees its step fail, as with gloo; it is the mesh that must find it a way out.
"""

from typing import Any

from mock_worker import VOCAB, Computed, Model, salt_of
from msgspec.structs import replace
from network import running
from pages import SimulatedMoves

from meshlm.protocol.config import Resolved
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.kv import MovePages
from meshlm.protocol.edges.step import Reset, StepPlan, StepResult
from meshlm.protocol.kv import KVSpec
from meshlm.protocol.lockstep import StepGroup
from meshlm.protocol.operations import Operation
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.columns import pack_i32
from meshlm.workers.distributed.membership import Incarnations
from meshlm.workers.engine import NOT_BALANCED, EngineFacts
from meshlm.workers.io import WorkerApp
from meshlm.workers.operations import Operations
from meshlm.workers.rows.extras.extra import RowExtras
from meshlm.workers.weights.versions import HasWeights, WorkerWeights

RESET_S = 0.3  # at most
POLL_S = 0.02  # between two looks into the store
Placement = tuple[int, int]  # of experts: the epoch and the step before which they moved there
FIRST, BROKEN = (0, 0), (-1, -1)
SEES_FAILURE = 0.3  # how often a rank sees that a peer is gone, instead of waiting for it


class Group:
    """What the lives of one group have in common: the store where they meet, and the steps that they compute."""

    def __init__(self, lives: Incarnations) -> None:
        self.lives = lives
        self.here: set[int] = set()  # ranks that have announced themselves in the store
        self.workers: dict[int, Worker] = {}  # ranks that have committed
        self.steps: list[Step] = []

    def step(self, nth: int) -> "Step":
        if nth == len(self.steps):
            self.steps.append(Step())
        return self.steps[nth]


class Step:
    """One plan in one group."""

    def __init__(self) -> None:
        self.plan: StepPlan | None = None
        self.begun: dict[int, set[int]] = {}  # by stage: the ranks that are at this step
        self.started: set[int] = set()  # stages
        self.computed: dict[int, list[Computed]] = {}  # by stage: of each rank that is done
        self.results: dict[int, list[tuple[Worker, StepResult]]] = {}  # likewise


class Together:
    """The workers of all ranks of a StepGroup: each step is computed when all are at it. It breaks when one of them leaves.

    Experts move before a step whose workers have all been asked for it. Each has them in their places at a time of its own: where the
    group breaks meanwhile, those that were not done have them anywhere.
    """

    def __init__(self, group: StepGroup) -> None:
        self.epoch, self.num_workers = group.epoch, group.num_workers
        self.connected: dict[Worker, None] = {}
        self.moving: dict[Worker, None] = {}
        self.met = False
        self.waiting: dict[Worker, tuple[int, StepPlan]] = {}  # that are at a step: its number, and the plan
        self.broken = False
        self.num_steps = 0

    def connect(self, worker: "Worker") -> bool:
        """Whether all are there. Those that meet go on with the experts where they are if all agree on where that is."""
        self.connected[worker] = None
        if len(self.connected) < self.num_workers:
            return False
        if not self.met and not self.broken:
            places = {one.placement for one in self.connected}
            for one in self.connected:
                one.meet(agreed=places != {BROKEN} and len(places) == 1)
            self.met = True
        return True

    def arrive(self, worker: "Worker", nth: int, plan: StepPlan) -> None:
        self.waiting[worker] = (nth, plan)
        if self.broken:
            self.abort()
        elif len(self.waiting) == self.num_workers:
            together, self.waiting = self.waiting, {}
            self.num_steps += 1
            assert {number for number, _ in together.values()} == {self.num_steps}, "ranks at different steps"
            places = {one.placement for one in together}
            assert len(places) == 1, f"ranks of a step look for experts in different places: {places}"
            assert BROKEN not in places, "a step with experts that are anywhere"
            moves = all(one.asked for one in together)
            self.moving = dict.fromkeys(together) if moves else {}
            for one, (_, its) in together.items():
                if moves:
                    one.begin_move()
                one._later(one._process.dice.random() * one._step_s, one._moved if moves else one._compute, its)

    # --- as a StepExchange ---

    def abort(self) -> None:
        self.broken = True
        for worker in (*self.waiting, *self.moving):
            worker._later(0.0, worker._aborted)
        self.waiting.clear()
        self.moving.clear()


class _Plans:
    """In the place of the stepper's queue."""

    def __init__(self, worker: "Worker") -> None:
        self.items: list[Any] = []
        self._worker = worker

    def put(self, item: tuple[StepPlan | Reset | Operation | MovePages, int]) -> None:
        self.items.append(item)
        self._worker.wake()


class SimulatedWeights(WorkerWeights):
    """Weights of sources that are nothing but names."""

    def check(self, engine: HasWeights, source: str) -> str:
        return f"digest of {source}"

    def _readable(self, version: WeightsVersion) -> Resolved:
        resolved = self._config.require_resolved()
        return replace(resolved, model_path=version.source) if version.number else resolved


class Worker(WorkerApp):
    """See the module docstring. WorkerReady is the stepper's word and may overtake results of plans before it, the completer's."""

    extras: RowExtras[Any] = RowExtras((), 0)  # its rows have none

    def __init__(
        self, num_blocks: int, block_size: int, step_s: float, max_drafts: int, specs: tuple[KVSpec, ...]
    ) -> None:
        super().__init__()
        self._facts = EngineFacts(num_blocks, block_size, 64, VOCAB, {}, max_drafts, tuple(PoolKind), 8, specs)
        self._step_s = step_s
        self._model = Model(num_blocks, block_size, specs)
        self._plans: Any = _Plans(self)
        self._group: Group | None = None
        self._process: Any = None
        self._loaded: Any = None
        self._busy = True
        self._nth = 0  # steps of this life
        self._completed_at = 0.0
        self._together: Together | None = None
        self._operations: Operations | None = None
        self._num_together = 0
        self.placement: Placement = FIRST
        self.asked = False  # to move experts

    # --- the stepper: loads, meets, takes plans in order ---

    def _stepper(self, loaded: Any) -> None:
        self._process, self._loaded = running(), loaded
        self._weights = SimulatedWeights(self._mesh.config)
        self.load_weights(self._weights.to_begin_with(None).require_resolved())
        if self._mesh.config.kv_transfer.moves:
            moves: Any = SimulatedMoves(self, self._process)
            self._moves = moves
        self._later(self._process.load_s, self._meet if self._shard.size > 1 else self._ready)

    def _completer(self) -> None:
        """`_complete` is called when a step's tokens are there."""

    def _later(self, delay_s: float, callback: Any, *arguments: Any) -> None:
        self._process.loop.call_later(delay_s, callback, *arguments)

    def _meet(self) -> None:
        """What membership.meet does, a look at a time."""
        membership, world = self._membership, self._process.world
        if membership._offered is None:
            membership._looked = None
        else:
            lives = membership.wait()
            if blocked_s := self._blocked_s():
                self._later(blocked_s, self._meet)
                return
            group = world.groups.setdefault(lives, Group(lives))
            group.here.add(self._shard.rank)
            if len(group.here) == len(lives) and membership.still(lives) and membership.commit(lives):
                self._group = group
                group.workers[self._shard.rank] = self
                self._connect()
                return
        self._later(POLL_S * (0.5 + self._process.dice.random()), self._meet)

    def _blocked_s(self) -> float:
        """For how long no word of the store comes, because the link to its host is cut."""
        world, group = self._process.world, self._mesh.config.parallel
        if group.nnodes == 1:
            return 0.0
        return float(max(0.0, world.whole_at((self._process.host, 0)) - world.now))

    def _connect(self) -> None:
        """Collective: all must have committed."""
        group = self._group
        assert group is not None
        if len(group.workers) == len(group.lives):
            for worker in group.workers.values():
                worker._process.loop.call_soon(worker._ready)

    def _ready(self) -> None:
        engine: Any = self
        self._loaded.set_result(engine)
        self._busy = False
        self.wake()

    @property
    def facts(self) -> EngineFacts:
        """As an engine."""
        return self._facts

    def graph_counts(self) -> GraphCounts:
        """Other counts after every so many steps, so that the word of it takes part."""
        return GraphCounts({"decode": self._nth // 8}) if self._nth >= 8 else GraphCounts()

    def wake(self) -> None:
        """There is something to do."""
        if self._busy or not self._plans.items:
            return
        self._busy = True
        message, _ = self._plans.items.pop(0)
        dice = self._process.dice
        if isinstance(message, MovePages):
            assert self._moves is not None
            self._moves.move(message)
            self._done()
        elif isinstance(message, Reset):
            self._later(dice.random() ** 4 * RESET_S, self._do_reset, message)
        elif isinstance(message, Operation):
            self._later(dice.random() * self._step_s, self._operate, message)
        elif self._together is not None:
            self._num_together += 1
            self._process.world.tell(self._process, "waits", self._mesh.identity, f"step {self._num_together}")
            self._together.arrive(self, self._num_together, message)
        elif self._group is None:
            self._later(dice.random() * self._step_s, self._compute, message)
        else:
            self._begin_step(message)

    def _done(self) -> None:
        self._busy = False
        self.wake()

    def _operate(self, operation: Operation) -> None:
        assert self._mesh is not None
        worker = (self, self._weights)
        self._operations = self._operations or Operations(self._mesh.config, self._mesh.identity, worker)
        self._say(self._operations.do(operation))
        self._done()

    def rebalance(self) -> str:
        assert self._mesh is not None
        self.asked = self._mesh.config.lockstep
        return "" if self.asked else NOT_BALANCED

    def check_weights(self, resolved: Resolved) -> str:
        return ""

    def load_weights(self, resolved: Resolved) -> None:
        number = resolved.model_path.partition("weights-")[2]
        self._model.salt = salt_of(int(number or 0))

    def sum_weights(self) -> str:
        return str(self._model.salt)

    def meet(self, *, agreed: bool) -> None:
        """The group has met. agreed: all have their experts in the same places."""
        self.asked = False
        if not agreed and self.placement != FIRST:
            self._process.world.tell(self._process, "puts", self._mesh.identity, "experts back")
        self.placement = self.placement if agreed else FIRST

    def begin_move(self) -> None:
        self.asked, self.placement = False, BROKEN
        self._process.world.tell(self._process, "moves", self._mesh.identity, "experts")

    def _moved(self, plan: StepPlan) -> None:
        """Its experts are where they should be, unless the group broke before."""
        assert self._together is not None
        if self in self._together.moving:
            del self._together.moving[self]
            self.placement = (self._together.epoch, self._together.num_steps)
            self._compute(plan)

    def _do_reset(self, reset: Reset) -> None:
        self._model.rows.clear()  # what the slots hold stays
        if reset.weights is not None:
            self._weights.change(self, reset.weights)
        exchange: Any = self._exchanges.pop(reset.session, None)
        self._together, self._num_together = exchange, 0
        self._meet_ranks(reset)

    def _meet_ranks(self, reset: Reset) -> None:
        """Where ranks step together, the worker is ready when all are."""
        together = self._together
        if together is not None and not together.connect(self) and not together.broken:
            self._later(POLL_S * (0.5 + self._process.dice.random()), self._meet_ranks, reset)
            return
        if together is None or not together.broken:
            engine: Any = self
            assert self._mesh is not None
            self._mesh.call_soon_threadsafe(self._answer, engine, reset)
        self._done()

    def _make_exchange(self, group: StepGroup) -> Any:
        return self._process.world.together.setdefault(group.epoch, Together(group))

    def _aborted(self) -> None:
        """A step for which the other ranks do not come."""
        self._process.world.tell(self._process, "aborts", self._mesh.identity, f"step {self._num_together}")
        self._directory.spoil()
        self._done()

    # --- a step of a group ---

    def _begin_step(self, plan: StepPlan) -> None:
        """The rank is at this step; it is computed when its whole stage is."""
        group, shard = self._group, self._shard
        assert group is not None
        step = group.step(self._nth)
        self._nth += 1
        step.plan = step.plan or plan
        assert plan == step.plan, f"a group computes different plans: {plan} and {step.plan}"
        step.begun.setdefault(shard.pp_rank, set()).add(shard.tp_rank)
        self._process.world.tell(self._process, "begins", self._mesh.identity, f"step {self._nth}")
        self._compute_stages(step)
        gone = [worker for worker in group.workers.values() if not worker._process.alive]
        if gone and self._process.dice.random() < SEES_FAILURE:
            self._failed(plan, RuntimeError("Connection closed by peer"))

    def _compute_stages(self, step: Step) -> None:
        group, shard = self._group, self._shard
        assert group is not None
        assert step.plan is not None
        for stage in range(shard.pp_size):
            if stage in step.started:
                if len(step.computed.get(stage, ())) < shard.tp_size:
                    return  # the next stage needs what this one gives
                continue
            if len(step.begun.get(stage, ())) < shard.tp_size:
                return
            step.started.add(stage)
            for rank in range(stage * shard.tp_size, (stage + 1) * shard.tp_size):
                worker = group.workers[rank]
                worker._later(worker._process.dice.random() * worker._step_s, worker._compute, step.plan, step)
            return

    def _compute(self, plan: StepPlan, step: Step | None = None) -> None:
        shard = self._shard
        tokens, given, computed = self._model.run(plan, shard.is_last)
        if step is not None:
            for stage in (shard.pp_rank - 1, shard.pp_rank):
                for other in step.computed.get(stage, ()):
                    assert computed == other, f"ranks of a group computed different things: {computed} and {other}"
            step.computed.setdefault(shard.pp_rank, []).append(computed)
        world = self._process.world
        self._completed_at = max(world.now + self._process.dice.random() ** 3 * self._step_s, self._completed_at)
        ns = int(world.now * 1e9)
        counts = pack_i32(given) if plan.num_drafts else b""
        details: dict[str, Any] = {"counts": counts, "pooled": self._model.pooled}
        if self._facts.max_drafts:  # by which the scheduler chooses how many: any, as chance has it
            details["gpu_ns"] = int(self._step_s * 1e9) * (1 + (plan.step * 2_654_435_761 >> 7) % 3)
        result = StepResult(plan.session, plan.step, pack_i32(tokens), launched_ns=ns, done_ns=ns + 1, **details)
        if step is None:
            self._later(self._completed_at - world.now, self._complete, result)
        else:  # the last sum over its stage comes behind what all have written
            results = step.results.setdefault(shard.pp_rank, [])
            results.append((self, result))
            if len(results) == shard.tp_size:
                for worker, its in results:
                    worker._later(max(0.0, worker._completed_at - world.now), worker._complete, its)
            self._compute_stages(step)
        self._done()

    def _complete(self, result: StepResult) -> None:
        if self._shard.reports:
            self._say(result)

    def leftover(self) -> str:
        """What must not be when all is well."""
        if self._shard.size == 1:
            return ""
        lives = (
            tuple(worker._process.incarnation for _, worker in sorted(self._group.workers.items()))
            if self._group
            else ()
        )
        committed = self._membership.committed
        return "" if committed == lives and self._plans.items == [] else f"committed to {committed} of {lives}"
