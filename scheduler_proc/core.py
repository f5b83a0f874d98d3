"""The scheduler's pure core: owns this rank's requests and KV blocks.

`handle(event, now)` takes what happened, `plan(now_ns)` gives the next step as long as fewer than `async_depth` are in
flight, `report()` says what the coordinator should know of it. Called by io.py; never sees a socket or a clock.
"""

from collections import deque

from msgspec.structs import replace

from meshlm.protocol.edges.admit import AbortRequests, Assign, GiveBack, ReportLoad, Welcome
from meshlm.protocol.edges.step import (
    ExtraReady,
    LastPlan,
    StepFailed,
    StepResult,
    WorkerAsleep,
    WorkerReady,
    WorkerStats,
)
from meshlm.protocol.edges.token import AttachTokens, Disown, StillThere
from meshlm.protocol.kv_events import KVEvent
from meshlm.protocol.lockstep import JointOrder
from meshlm.protocol.operations import (
    AbortRunning,
    CallWorkers,
    Operation,
    OperationDone,
    Pause,
    ResetPrefixCache,
    Resume,
    Stop,
)
from meshlm.protocol.sleeping import AWAKE
from meshlm.protocol.wire.columns import unpack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Identity, RequestId, Role, StepId
from meshlm.runtime.process.events import Event, PeerLost, PeerUp, Received, Send, Tick
from meshlm.scheduler_proc.batching import Batching
from meshlm.scheduler_proc.connectors.transfers import Transfers
from meshlm.scheduler_proc.estimates import Estimates
from meshlm.scheduler_proc.limits import Limits
from meshlm.scheduler_proc.lockstep import Lockstep
from meshlm.scheduler_proc.operations import Operations
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.pausing import ended_by
from meshlm.scheduler_proc.plan import Inflight
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.request_table import RequestTable
from meshlm.scheduler_proc.results import Results
from meshlm.scheduler_proc.states import Planning, Session
from meshlm.scheduler_proc.suspects import Suspects
from meshlm.scheduler_proc.wishes import Wish, Wishes
from meshlm.scheduler_proc.workers import Workers

AT_ONCE = (Stop, Pause, Resume, AbortRunning)  # operations that need no worker that is ready


class Scheduler:
    """A rank: its requests, its session with the workers, and the steps in flight."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.workers = Workers(limits)
        self._rank = self.workers.rank
        self.table = RequestTable(limits, self.workers)
        self.load = self.table.load
        self.results = Results(self.table)
        self.suspects = Suspects(self.table, limits.max_crashes)
        self.operations = Operations(self.workers.all)
        self.wishes = Wishes(self.workers, self.operations)
        self.lockstep = Lockstep(limits.async_depth + 1, limits.num_workers) if limits.lockstep else None
        self.inflight: deque[Inflight] = deque()
        self.num_steps = 0
        self.estimates: Estimates | None = None  # with --enable-mfu-metrics
        self._next_step = 1
        self.transfers = Transfers(self.table, limits, self.workers.all) if limits.kv_transfer.moves else None

    @property
    def requests(self) -> dict[RequestId, Request]:
        """All requests of this rank that have not ended."""
        return self.table.by_id

    @property
    def batching(self) -> Batching:
        """The queues, rows and blocks, as large as these workers' memory."""
        return self.table.batching

    @property
    def session(self) -> int:
        """The session with the workers."""
        return self.workers.session

    @property
    def _depth(self) -> int:
        """The number of steps that may be in flight: one for each stage at least."""
        return max(self.limits.async_depth, self.limits.num_stages)

    @property
    def serving(self) -> bool:
        """Whether all of this rank's workers can step."""
        return self.workers.rank.serves

    # --- a turn: what happened, the steps that may follow, and what the coordinator should know ---

    def handle(self, event: Event, now: float) -> list[Send]:
        self.batching.now_ns = now_ns = int(now * 1e9)
        output = Output(now_ns, self.limits.dp_rank, self.workers.label)
        effects, timings = list[Send](), tuple[int, ...]()
        match event:
            case Received(message=StepResult() as result):
                timings = self._result(result, output)
            case Received():
                effects = self._received(event, output)
            case PeerUp():
                effects = self._peer_up(event, output, now)
            case PeerLost():
                effects = self._peer_lost(event, output)
            case Tick():
                self.table.expire(event.wall_s, output)
                self.load.tell_all()
                if self.lockstep is not None:
                    self.lockstep.tell_again()
                effects = self._anew(now) if self.wishes.retries(now) else []
        if self.serving:
            effects += self.table.preparations.messages(self.session)
        if self.transfers is not None:
            effects += self.transfers.handle(event, output)
        effects += [Send(to, message) for to, message in output.messages(timings)]
        return effects

    def plan(self, now_ns: int) -> list[Send]:
        """The next step for all workers of the rank, if one may be sent now and has something to do."""
        lockstep = self.lockstep
        steps_along = lockstep is not None and self.serving and self._rank.rests
        holds = len(self.inflight) >= self.batching.budget.depth(self._depth) or self.operations.holds_steps
        holds = holds or (self.transfers is not None and self.transfers.holds_steps(now_ns))
        if holds or not (self._rank.plans or steps_along) or (lockstep is not None and not lockstep.may_step()):
            return []
        goes_on = bool(self.batching.running)
        step = StepId(self._next_step)
        is_idle = not any(record.batch for record in self.inflight)
        planned = self.batching.plan(self.session, step, now_ns, may_be_empty=lockstep is not None, is_idle=is_idle)
        if planned is None:
            return []
        if lockstep is not None:
            lockstep.stepped()
        plan, record = planned
        if self.transfers is not None:
            self.transfers.planned(plan)
        if self.estimates is not None and len(record.batch):
            self.estimates.count(plan, self.batching.counts)
        record.goes_on = goes_on
        self._next_step += 1
        self.num_steps += 1
        self.inflight.append(record)
        return [Send(worker, plan) for worker in self.workers.all]

    def report(self) -> list[Send]:
        """A Load, if one is due. Called after the messages and the plan, which are not to wait for it: once for a burst of requests."""
        serving, effects = self.serving, []
        if self.lockstep is not None:
            effects = self.lockstep.report(has_work=self.batching.may_work)
            serving = self.lockstep.serves(serving, self.batching.now_ns)
        self.load.weights = self.workers.weights, self.workers.behind
        load = self.load.load(self.batching, serving, self.num_steps)
        return effects if load is None else [*effects, Send(COORDINATOR, load)]

    def kv_events(self) -> list[KVEvent]:
        """What happened to the prefix cache since the last call, in order; nothing without --kv-events-config."""
        events = self.batching.kv.pool.events
        return [] if events is None else events.take()

    # --- the parts of a turn ---

    def _result(self, result: StepResult, output: Output) -> tuple[int, ...]:
        if result.session != self.session or not self.inflight or self.inflight[0].step != result.step:
            return ()  # of an earlier session, or another worker's copy
        record = self._finished()
        if self.transfers is not None:
            self.transfers.computed(record.step)
        self.results.apply(record, result, output)
        self.results.time(record, result, output.now_ns)
        at = (record.planned_ns, result.received_ns, result.launched_ns, result.done_ns, output.now_ns)
        return (result.step, *at, result.gpu_ns, result.gap_ns)

    def _finished(self) -> Inflight:
        """Takes the oldest step in flight out: it is over."""
        if self.lockstep is not None:
            self.lockstep.finished()
        return self.inflight.popleft()

    def _received(self, event: Received, output: Output) -> list[Send]:
        match event.message:
            case Assign() as assign:
                self.table.assign(assign, output)
            case AbortRequests() as abort:
                self.table.abort(abort.request_ids)
            case GiveBack() as give_back:
                self.table.give_back(give_back)
            case ReportLoad(number=number):
                self.load.asked(number)
            case Welcome(sleeping=sleeping):
                if sends := self.workers.welcome(sleeping, output.now_ns / 1e9):
                    self._begun(sends)
                self.load.sleeping = self.workers.sleeping or AWAKE
                return sends
            case WorkerReady() as ready:
                return self._worker_ready(event.sender, ready, output)
            case WorkerAsleep() as asleep:
                return self._worker_asleep(event.sender, asleep, output.now_ns / 1e9)
            case LastPlan() as last_plan:
                return self.workers.compare_last_plan(event.sender, last_plan)
            case JointOrder() as order if self.lockstep is not None and self.lockstep.follow(order):
                self._lose_workers()
                begun = self.workers.begin(output.now_ns / 1e9, self.lockstep.group)
                return [*self.operations.lose_workers(), *begun]
            case Operation(action=wish) as operation if isinstance(wish, Wish):
                return self._wish(operation, wish, output.now_ns / 1e9)
            case Operation() as operation:
                return self._asked(operation, output)
            case OperationDone() as done:
                return self._done(event.sender, done, output.now_ns / 1e9)
            case WorkerStats() as stats:
                self.load.worker(stats.graphs, event.incarnation)
            case ExtraReady() as ready if ready.session == self.session:
                for request in self.table.preparations.ready(event.sender, ready):
                    if ready.failed is not None:
                        self.table.fail_row(request, output, ready.failed)
            case StepFailed() as failed:
                return self._step_failed(failed, output)
            case AttachTokens() as attach:
                self.table.attach(attach, output)
            case Disown() as disown:
                self.table.disown(event.sender, set(unpack_i32(disown.handles)))
            case StillThere() as asked:
                return self.table.still_there(event.sender, asked)
        return []

    # --- workers ---

    def _peer_up(self, event: PeerUp, output: Output, now: float) -> list[Send]:
        if event.identity.role is Role.WORKER:
            self._lose_workers()
            begun = self._begun(self.workers.up(event.identity, event.incarnation, now))
            return [*self.operations.lose_workers(), *begun]
        if event.identity == COORDINATOR:
            self.load.begin()
            if self.lockstep is not None:
                self.lockstep.tell_again()
        elif event.identity.role is Role.DETOKENIZER:
            for assign in self.table.detokenizers.up(event.identity, event.incarnation):
                self.table.assign(assign, output)
        return []

    def _peer_lost(self, event: PeerLost, output: Output) -> list[Send]:
        if event.identity.role is Role.WORKER:
            if self.lockstep is not None:
                self.lockstep.lost()
            self.suspects.worker_died([request for record in self.inflight for request in record.batch], output)
            self._lose_workers()
            self.batching.kv.tell_cleared()
            return [*self.operations.lose_workers(), *self.workers.lost(event.identity, event.incarnation)]
        elif event.identity.role is Role.DETOKENIZER:
            self.table.detokenizer_lost(event.identity, event.incarnation)
        return []

    def _begun(self, sends: list[Send]) -> list[Send]:
        """Takes what begins a session, which no order to step together has asked for: the rank is a new member of its group, unless its
        workers are not all there or are to sleep."""
        if self.lockstep is not None:
            self.lockstep.begin(self.workers.session if sends and not self.workers.asleep else 0)
        return sends

    def _lose_workers(self) -> None:
        """The computed KV is gone: all requests wait again with the tokens they have."""
        self.workers.forget()
        self.inflight.clear()
        self._next_step = 1
        self.results.begin()
        for request in list(self.batching.running):
            self.batching.preempt(request, "worker_lost")
        self.table.lose_workers()
        if self.transfers is not None:
            self.transfers.end()

    def _anew(self, now: float) -> list[Send]:
        """A session with the same workers, for other wishes or another try."""
        self._lose_workers()
        self.wishes.rekey(self.requests.values())
        return self._begun(self.workers.begin(now))

    def _wish(self, operation: Operation, wish: Wish, now: float) -> list[Send]:
        told, begins = self.wishes.take(operation, wish)
        self.load.tell_all()
        return [*told, *self._anew(now)] if begins else told

    def _asked(self, operation: Operation, output: Output) -> list[Send]:
        """An operation that workers do between two steps, or this process alone."""
        self.operations.add(operation)
        if self.serving or isinstance(operation.action, AT_ONCE) or self.wishes.may_do(operation):
            return self._operate(operation, output)
        return self.operations.answer(operation, "the workers sleep (POST /wake_up)") if self.workers.asleep else []

    def _done(self, worker: Identity, done: OperationDone, now: float) -> list[Send]:
        """A worker's answer. Where a method has changed the weights, all that was computed is of others."""
        sends = self.operations.answered(worker, done)
        changed = next((send.message.weights for send in sends if isinstance(send.message, OperationDone)), None)
        if changed is not None:
            self.wishes.changed_by_call(changed)
            sends += self._anew(now)
        return sends

    def _worker_asleep(self, sender: Identity, asleep: WorkerAsleep, now: float) -> list[Send]:
        self.workers.sleeps(sender, asleep)
        if self._rank.session is not Session.ASLEEP:
            return []
        self.batching.kv.tell_cleared()
        if self.lockstep is not None:
            self.lockstep.lost()
        self.load.sleeping = asleep.sleeping
        self.load.tell_all()
        return self.wishes.settled(now)

    def _worker_ready(self, sender: Identity, ready: WorkerReady, output: Output) -> list[Send]:
        facts = self.workers.ready(sender, ready)
        if self._rank.session is Session.BEHIND:
            self.load.tell_all()
            return (self.wishes.settled if self.workers.have_been_asked else self._anew)(output.now_ns / 1e9)
        if not facts:
            return []
        self.wishes.rekey(self.requests.values())
        if self.lockstep is not None:
            self.lockstep.prepared()
        self.workers.sleeping = self.load.sleeping = AWAKE
        least = ("num_blocks", "max_num_seqs", "max_drafts", "max_draft_lines")
        common = replace(facts[0], **{name: min(getattr(fact, name) for fact in facts) for name in least})
        before = self.batching
        self.table.batching = Batching(self.limits, common, self._rank, before)
        self.batching.restore(facts)
        if self.transfers is not None:
            self.transfers.begin(self.session, facts)
        for request in before.waiting:
            request.hashes = []
            self.batching.enqueue(request)
        for request in before.waiting:
            self.table.refuse_unfit(request, output)
        pending = list(self.operations.pending.values())
        return [send for operation in pending for send in self._operate(operation, output)]

    def _operate(self, operation: Operation, output: Output) -> list[Send]:
        """Carries an operation out between the plans that were sent and the next: first what it changes here, then at the workers."""
        match operation.action:
            case ResetPrefixCache(preempt=preempt):
                if not self.batching.reset_prefix_cache(preempt=preempt):
                    return self.operations.answer(operation, f"{len(self.batching.running)} requests run")
            case CallWorkers():  # the weights may be others from now on
                self.batching.kv.reset_prefix_cache(self.batching.running)
                self.batching.encoder.clear()
            case Pause() | AbortRunning() as action:
                if isinstance(action, Pause):
                    self._rank.move_planning(Planning.DRAINING if action.wait else Planning.PAUSED)
                ended = ended_by(action, list(self.table.by_id))
                for request_id in ended:
                    self.table.finish(self.table.by_id[request_id], output, FinishReason.ABORT)
                return self.operations.answer(operation, count=len(ended))
            case Resume():
                self._rank.move_planning(Planning.RUNNING)
                return self.operations.answer(operation)
            case action if isinstance(action, Wish):  # the workers have answered
                return self.operations.answer(operation)
            case Stop():
                self._rank.move_planning(Planning.STOPPED)
                if not self.serving:  # nothing is in flight
                    return self.operations.answer(operation)
        if self.transfers is not None and isinstance(operation.action, CallWorkers):
            self.transfers.rename(operation.id)
        return self.operations.send(operation)

    def _step_failed(self, failed: StepFailed, output: Output) -> list[Send]:
        """The request that a step fails for ends, and those that shared the step are computed anew; what it would have written to the
        cache cannot be trusted (nor does the worker keep it)."""
        record = next(
            (one for one in self.inflight if one.step == failed.step), None
        )  # results of steps before it may still come
        if failed.session != self.session or record is None:
            return []
        self.suspects.step_failed(record.batch, failed.message, output, apart=self.lockstep is None)
        if self.lockstep is not None:  # a result that no frame holds: the step was computed, with the other ranks
            self._finished()
            self.batching.kv.reset_prefix_cache(self.batching.running)
            return []
        self._lose_workers()  # the steps behind it have the same rows, and would fail with others in them
        return [*self.operations.lose_workers(), *self.workers.begin(output.now_ns / 1e9)]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.batching.check()
        if self.transfers is not None:
            self.transfers.check()
        self.table.check(self.inflight, self._depth + 1)
