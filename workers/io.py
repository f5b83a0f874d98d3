"""The worker's links and threads.

Three threads: the event loop (links, heartbeat), the stepper (prepares and launches plans in order, loads the model first) and the
completer (waits for a step's tokens without holding the interpreter). The engine is the stepper's alone. Where KV pages move,
others copy them (kv/moves.py).
"""

import asyncio
import queue
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from meshlm.protocol.edges.control import STEPPING, GraphCounts
from meshlm.protocol.edges.kv import FindPages, LeavePages, MovePages
from meshlm.protocol.edges.step import (
    LastPlan,
    PrepareExtra,
    Reset,
    ResetGroup,
    StepFailed,
    StepPlan,
    StepResult,
    WorkerStats,
)
from meshlm.protocol.lockstep import StepGroup
from meshlm.protocol.operations import CallWorkers, OfTransfer, Operation, ResetPrefixCache
from meshlm.protocol.wire.columns import unpack_i32
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.errors import LinkDown, MessageTooLong
from meshlm.runtime.mesh import keys
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process import in_hand
from meshlm.workers.distributed.lockstep import SocketExchange, StepAborted, StepExchange
from meshlm.workers.distributed.membership import Membership
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.distributed.tcp_exchange import TcpExchange
from meshlm.workers.engine import Engine, Pending
from meshlm.workers.engines import make_engine, page_moves, ready
from meshlm.workers.extra_threads import ExtraThreads
from meshlm.workers.kv.mirror import PrefixCacheMirror
from meshlm.workers.operations import Extension, Operations, load_profiler
from meshlm.workers.sessions import Sessions
from meshlm.workers.sleep import WorkerSleep
from meshlm.workers.step_timeline import StepTimeline
from meshlm.workers.weights.transfer.receiver import WeightReceiver
from meshlm.workers.weights.versions import WorkerWeights
from meshlm.workers.worker_states import WorkerState, WorkerStates

if TYPE_CHECKING:
    from meshlm.workers.kv.moves import PageMoves

IDLE_AFTER_S = 0.05  # without a plan, background work is done: between two requests, not between two steps
BETWEEN_S = 0.001  # two pieces of it: a plan comes first
STATS_S = 1.0
ANEW_S = 30.0  # a rank that is lost makes a new session within a second or two, one that hangs within --stall-timeout
SWITCH_INTERVAL_S = 1e-4  # the stepper must not keep the loop waiting for its turn of 5 ms


class WorkerApp:
    def __init__(self) -> None:
        self._mesh: Mesh  # from `start` on, as the next
        self._weights: WorkerWeights
        self._engine: Engine | None = None
        self._plans: queue.SimpleQueue[tuple[StepPlan | Reset | Operation | MovePages, int] | None] = (
            queue.SimpleQueue()
        )
        self._pending: queue.SimpleQueue[tuple[StepPlan, Pending] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._extra_threads = ExtraThreads(self._say)
        self._reset: Reset | None = None  # the scheduler's newest wish that came before the model was loaded
        self._wishes: queue.SimpleQueue[Reset | None] = queue.SimpleQueue()  # all of them, with --enable-sleep-mode
        self._launched = self._failed_launches = self._completed = 0  # steps; the last is the completer's
        self._step_timeline = StepTimeline()
        self._membership = Membership()
        self._shard: Shard = WHOLE
        self._directory = PrefixCacheMirror()
        self._exchange: StepExchange | None = None  # of the newest Reset
        self._exchanges: dict[int, StepExchange] = {}  # by session, for the stepper
        self._session = 0  # of the newest Reset
        self._counts = GraphCounts()  # as the scheduler knows them
        self._last = (0, 0)  # session and step of the last plan that came ...
        self._num_plans = self._num_rows = 0  # ... the number of all, and the requests of the last one
        self._states = WorkerStates()
        self._sleep = WorkerSleep(self._states, self._say)
        self._moves: PageMoves | None = None  # made with the engine, where pages move
        self._receiver: WeightReceiver

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._mesh, self._weights = mesh, WorkerWeights(mesh.config)
        self._shard = Shard.of_worker(mesh.config.parallel, mesh.identity.index)
        device = lambda: getattr(self._engine, "device")  # noqa: B009, E731 - of engines that have one
        self._receiver = WeightReceiver(mesh.config, mesh.identity.index, self._say, device)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loaded: asyncio.Future[Engine | None] = asyncio.get_running_loop().create_future()
        stepper = threading.Thread(target=self._stepper, args=(loaded,), name="stepper", daemon=True)
        completer = threading.Thread(target=self._completer, name="completer", daemon=True)
        self._threads = [stepper, completer]
        for thread in self._threads:
            thread.start()
        engine = await loaded
        if engine is None:
            return {"asleep": "without its weights"}
        self._has_loaded(engine)
        return engine.facts.shown

    def _has_loaded(self, engine: Engine) -> None:
        self._engine = engine
        if self._moves is not None:
            self._moves.begin(self._session)
        if self._reset is not None:
            self._plans.put((self._reset, 0))
        if self._shard.reports:
            self._mesh.call_later(STATS_S, self._stats)

    # --- stepper thread ---

    def _stepper(self, loaded: "asyncio.Future[Engine | None]") -> None:
        loop, mesh = loaded.get_loop(), self._mesh

        def report(phase: str, done: int, total: int, unit: str) -> None:
            self._states.phase = phase
            loop.call_soon_threadsafe(mesh.progress, phase, done, total, unit)

        def answer(result: Engine | BaseException | None) -> None:
            if loaded.done():  # it began asleep, or was cancelled
                if isinstance(result, BaseException):
                    mesh.fatal(str(result))
                elif result is not None and not loaded.cancelled():
                    self._has_loaded(result)
            elif isinstance(result, BaseException):
                loaded.set_exception(result)
            else:
                loaded.set_result(result)

        try:
            sleeps, asleep = mesh.config.worker.enable_sleep_mode, lambda: loop.call_soon_threadsafe(answer, None)
            if sleeps and not self._sleep.until_awake(self._wishes, asleep):
                return
            load_profiler(mesh.config.worker.profiler_dir)
            config = self._weights.to_begin_with(self._sleep.weights)
            engine = make_engine(config, mesh.identity.index, self._membership, report)
            extension = Extension(mesh.config.worker.worker_extension_cls, engine, mesh.identity.index)
            self._moves = page_moves(mesh.config, mesh.identity.index, engine, (self._say, self._end))
            if self._moves is not None:
                self._moves.use_weights(self._weights.version)
        except BaseException as error:  # whoever waits for the engine raises it
            loop.call_soon_threadsafe(answer, error)
            return
        loop.call_soon_threadsafe(answer, engine)
        try:
            self._step_for_ever(engine, extension)
        except BaseException as error:  # without this thread the worker would be alive and do nothing
            mesh.log.exception("the stepper died")
            first_line = next(iter(str(error).splitlines()), "")
            self._end(f"{type(error).__name__}: {first_line}")

    def _step_for_ever(self, engine: Engine, extension: Extension | None) -> None:
        background, wait_s = True, BETWEEN_S
        on_call = (lambda _: None) if self._moves is None else self._moves.forget_weights
        operations = Operations(self._mesh.config, self._mesh.identity, (engine, self._weights), extension, on_call)
        states = self._states
        aborted = partial(self._mesh.call_soon_threadsafe, self._on_aborted)
        end = lambda reason: self._end(f"{self._mesh.identity} {reason}")  # noqa: E731
        sessions = Sessions(states, self._sleep, self._weights, aborted, end)
        states.move(WorkerState.IDLE)
        while True:
            try:
                item = self._plans.get(timeout=wait_s) if background else self._plans.get()
            except queue.Empty:
                background, wait_s = engine.idle(), BETWEEN_S
                continue
            wait_s = IDLE_AFTER_S
            if item is None:
                return
            message, received_ns = item
            if isinstance(message, Reset):
                self._begin(engine, sessions, message)
                background = states.state is WorkerState.IDLE  # no graph is captured in its sleep
                continue
            if isinstance(message, MovePages):
                if self._moves is not None:
                    self._moves.move(message)
                continue
            before = states.state
            states.move(WorkerState.OPERATING if isinstance(message, Operation) else WorkerState.STEPPING)
            if isinstance(message, Operation):
                self._say(operations.do(message))
            else:
                self._launch(engine, message, received_ns)
            states.move(before)

    def _launch(self, engine: Engine, plan: StepPlan, received_ns: int) -> None:
        self._launched += 1
        begin_ns = time.monotonic_ns()
        try:
            pending = engine.step(plan, received_ns)
        except StepAborted:  # its requests are computed anew in the session that follows
            self._failed_launches += 1
            self._mesh.call_soon_threadsafe(self._on_aborted, plan.session)
        except Exception as error:  # a step's; its requests are told, or the process ends (_failed)
            self._failed_launches += 1
            self._failed(plan, error)
        else:
            self._step_timeline.launched(self._mesh.timeline, plan, begin_ns)
            self._pending.put((plan, pending))

    def _begin(self, engine: Engine, sessions: Sessions, reset: Reset) -> None:
        if self._moves is not None:
            self._moves.wait()
        key = self._weights.version.key
        has_begun = sessions.begin(engine, reset, self._exchanges.pop(reset.session, None))
        if self._moves is not None and key != self._weights.version.key:
            self._moves.use_weights(self._weights.version)
        if has_begun:
            self._mesh.call_soon_threadsafe(self._answer, engine, reset)

    def _failed(self, plan: StepPlan, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        first_line = text.splitlines()[0]
        if "CUDA error" in text or "device-side assert" in text:
            self._mesh.call_soon_threadsafe(self._mesh.fatal, f"the GPU failed: {first_line}")
            return
        self._mesh.log.exception(
            "step failed", step=plan.step, error=text
        )  # the scheduler's line names its requests by the step
        if self._shard.size > 1 or self._mesh.config.lockstep:
            # the other ranks are in the middle of the same step, and wait for this one
            self._mesh.call_soon_threadsafe(self._mesh.fatal, f"a step of the group failed: {first_line}")
            return
        self._say(StepFailed(plan.session, plan.step, first_line))

    # --- completer thread ---

    def _completer(self) -> None:
        while (item := self._pending.get()) is not None:
            plan, pending = item
            try:
                result: StepResult = pending.wait()
            except Exception as error:  # as above
                self._failed(plan, error)
            else:
                if self._shard.reports:
                    self._say(result)
                self._step_timeline.ended(self._mesh.timeline, plan, result)
            self._completed += 1
            in_hand.count(self.num_requests())

    def _end(self, reason: str) -> None:
        """Ends this process, from any thread."""
        self._mesh.call_soon_threadsafe(self._mesh.fatal, reason)

    def _say(self, message: Struct) -> None:
        """Sends a message to the scheduler, from any thread."""
        self._mesh.call_soon_threadsafe(self._send, message)

    # --- event loop ---

    def _send(self, message: Struct) -> None:
        if isinstance(message, StepFailed):
            self._directory.spoil()
        scheduler = Identity(Role.SCHEDULER, self._mesh.identity.index // self._mesh.config.parallel.workers_per_rank)
        try:
            self._mesh.send(scheduler, message)
        except LinkDown:
            self._mesh.log.debug("the scheduler is away", message=type(message).__name__)
        except MessageTooLong as error:
            if isinstance(message, StepResult):
                self._send(StepFailed(message.session, message.step, str(error)))

    def _stats(self) -> None:
        """Tell the scheduler what has changed since it was told."""
        assert self._engine is not None
        self._mesh.call_later(STATS_S, self._stats)
        counts = self._engine.graph_counts()
        if counts != self._counts:
            self._counts = counts
            self._send(WorkerStats(counts))

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case StepPlan():
                self._last = (message.session, message.step)
                self._num_plans, self._num_rows = self._num_plans + 1, len(message.rows) // 4
                in_hand.count(self._num_rows)
                self._directory.apply(message)
                self._plans.put((message, time.monotonic_ns()))
            case Reset():
                self._on_reset(message)
            case Operation(action=action) if isinstance(action, OfTransfer):
                self._receiver.handle(message)
            case Operation():
                if isinstance(message.action, ResetPrefixCache | CallWorkers):
                    self._directory.reset_prefix_cache()
                self._plans.put((message, 0))
            case PrepareExtra():
                assert self._engine is not None
                self._extra_threads.submit(self._engine, message)
            case MovePages(is_load=False) if self._moves is not None:  # of steps whose results are back
                self._moves.move(message, is_behind_steps=False)
            case MovePages():
                if message.is_load:
                    self._directory.forget(unpack_i32(message.pages))
                self._plans.put((message, 0))
            case FindPages() if self._moves is not None:
                self._moves.find(message)
            case LeavePages() if self._moves is not None:
                self._moves.leave(message)
            case ResetGroup():
                if not self._membership.withdraw():
                    self._leave(message.reason)

    def _on_reset(self, reset: Reset) -> None:
        self._session = reset.session
        self._receiver.session_ended()
        if self._moves is not None:
            self._moves.begin(reset.session)
        if self._exchange is not None:  # the stepper may wait for others, and a plan in the queue would
            self._exchange.abort()
            self._exchange = None
        if reset.group is not None:
            self._exchange = self._exchanges[reset.session] = self._make_exchange(reset.group)
        if reset.incarnations:
            if not self._membership.offer(reset.incarnations):
                self._leave("another worker of the group was started again")
                return
            self._send(LastPlan(reset.session, *self._last))
        if reset.sleeping is not None and reset.sleeping.tags:
            self._directory.reset_prefix_cache()  # the KV cache comes back empty
        if self._engine is None:
            self._reset = reset
            self._wishes.put(reset)
        else:
            self._plans.put((reset, 0))

    def _on_aborted(self, session: int) -> None:
        """A step of it was not computed with the other ranks: one of them is gone, and a new session is to follow."""
        self._directory.spoil()
        self._mesh.call_later(ANEW_S, self._check_anew, session)

    def _check_anew(self, session: int) -> None:
        """Nobody is gone where none followed: what failed is here, and only a new incarnation gets out of it."""
        if self._session == session:
            self._mesh.fatal("the ranks that step together lost one another, and none of them is gone")

    def _make_exchange(self, group: StepGroup) -> StepExchange:
        config, member = self._mesh.config, self._mesh.identity.index
        if not config.steps_over_nodes:
            return SocketExchange(config.run.run_dir, group, member)
        address = config.parallel.master_addr, config.parallel.step_ports[1]
        return TcpExchange(address, group, member, keys.load(config.network.key_file), config.network)

    def _answer(self, engine: Engine, reset: Reset) -> None:
        self._counts = GraphCounts()  # the scheduler may be a new one
        facts = engine.facts
        resolved = self._mesh.config.require_resolved()
        kept, hashes = self._directory.columns()
        own = self._weights.version, self._weights.behind
        answer = ready(reset.session, facts, resolved.max_num_batched_tokens, (kept, hashes), own)
        self._send(answer if self._moves is None else self._moves.described(answer))

    def _leave(self, reason: str) -> None:
        """End this process, whatever its threads wait for; it is started again and meets the new group."""
        self._mesh.fatal(f"{self._mesh.identity} leaves its group: {reason}")

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        """The scheduler speaks first."""

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        """Weights stay; the next scheduler resets the rows."""

    def flush(self) -> None:
        """Results leave one by one: each is a whole step."""

    def beat(self) -> tuple[int, str]:
        """Launched is not done: a device that hangs leaves both threads in good spirits but for one."""
        ended = self._completed + self._failed_launches
        return ended, STEPPING if ended < self._launched else self._states.phase

    def num_requests(self) -> int:
        return self._num_rows if self._completed + self._failed_launches < self._num_plans else 0

    async def drain(self, limit_s: float) -> None:
        """Frontends end first and wait for their requests; nothing is left then."""

    async def stop(self) -> None:
        self._extra_threads.close()
        if self._moves is not None:
            self._moves.close()
        self._wishes.put(None)
        self._plans.put(None)
        self._pending.put(None)
