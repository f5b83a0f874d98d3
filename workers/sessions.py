"""The beginning of a session with the scheduler: rows are forgotten, memory and weights are as it wants them, ranks that step together
meet. Used by the stepper thread (io.py).
"""

from collections.abc import Callable

import structlog

from meshlm.protocol.edges.step import Reset
from meshlm.protocol.sleeping import WEIGHTS
from meshlm.workers.distributed.lockstep import LockstepEngine, StepAborted, StepExchange
from meshlm.workers.engine import Engine
from meshlm.workers.sleep import WorkerSleep
from meshlm.workers.weights.versions import WorkerWeights
from meshlm.workers.worker_states import WorkerState, WorkerStates

_log = structlog.get_logger()


class Sessions:
    """`sleep` and `weights` are of this worker; `aborted` is told of a session in which a rank was lost, `end` ends the process."""

    def __init__(
        self,
        states: WorkerStates,
        sleep: WorkerSleep,
        weights: WorkerWeights,
        aborted: Callable[[int], None],
        end: Callable[[str], None],
    ) -> None:
        self._states, self._sleep, self._weights, self._aborted, self._end = states, sleep, weights, aborted, end

    def begin(self, engine: Engine, reset: Reset, exchange: StepExchange | None) -> bool:
        """False: the worker sleeps, or another Reset follows."""
        engine.reset()
        if reset.sleeping not in (None, self._sleep.current):
            if isinstance(engine, LockstepEngine):
                engine.join(None)  # nothing of what connects it to other ranks is held in its sleep
            if not self._sleep.change(engine, reset.sleeping):
                self._end("drops its weights to sleep; its successor waits without any")
        if reset.weights is not None and WEIGHTS not in self._sleep.current.tags:
            self._weights.change(engine, reset.weights)
        if self._states.state is not WorkerState.IDLE:
            if self._states.state is WorkerState.ASLEEP:  # else the successor of this process says so
                self._sleep.tell(reset, self._weights.behind)
            return False
        return not isinstance(engine, LockstepEngine) or self._join(engine, exchange, reset.session)

    def _join(self, engine: LockstepEngine, exchange: StepExchange | None, session: int) -> bool:
        """Meet the other ranks. False: one of them is lost."""
        self._states.move(WorkerState.MEETING)
        try:
            engine.join(exchange)
        except StepAborted as error:
            _log.warning("the ranks that step together have not met", reason=str(error))
            self._aborted(session)
            return False
        finally:
            self._states.move(WorkerState.IDLE)
        return True
