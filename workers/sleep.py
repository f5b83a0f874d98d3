"""A worker's sleep (--enable-sleep-mode): whether it has a model yet, and which memory it is without. Used by the stepper thread."""

import queue
from collections.abc import Callable

from msgspec import Struct

from meshlm.protocol.edges.step import Reset, WorkerAsleep
from meshlm.protocol.sleeping import AWAKE, WEIGHTS, Sleeping
from meshlm.protocol.weights import WeightsVersion
from meshlm.workers.engine import Engine
from meshlm.workers.worker_states import WorkerState, WorkerStates

DROPPED = 2  # the level of sleep in which nobody has the weights


class WorkerSleep:
    """`current` is what the scheduler last asked for. `say` sends a message to it."""

    def __init__(self, states: WorkerStates, say: Callable[[Struct], None]) -> None:
        self.current = AWAKE
        self.weights: WeightsVersion | None = None  # that the Reset which woke it wants; None: it began awake
        self._states, self._say = states, say

    def until_awake(self, wishes: "queue.SimpleQueue[Reset | None]", asleep: Callable[[], object]) -> bool:
        """Waits until the scheduler wants a model here; `asleep` is called while it does not. False: the process ends."""
        while (reset := wishes.get()) is not None:
            self.current, self.weights = reset.sleeping or self.current, reset.weights
            if WEIGHTS not in self.current.tags:
                self.current = AWAKE  # until the Reset comes to the engine
                if self._states.state is WorkerState.UNLOADED:
                    self._states.move(WorkerState.LOADING)
                return True
            self._states.move(WorkerState.UNLOADED)
            asleep()
            self.tell(reset)
        return False

    def tell(self, reset: Reset, behind: str = "") -> None:
        """Answers a Reset by which no model is to be here, or no KV cache. behind: why the model has other weights than are wanted."""
        self._say(WorkerAsleep(reset.session, self.current, behind))

    def change(self, engine: Engine, wanted: Sleeping) -> bool:
        """Be without the memory of these tags. False: weights that are dropped are another process's to load, and this one ends."""
        self.current = wanted
        if wanted.level >= DROPPED and WEIGHTS in wanted.tags:
            self._states.move(WorkerState.DROPPED)
            return False
        asleep = bool(wanted.tags)
        self._states.move(WorkerState.FALLING_ASLEEP if asleep else WorkerState.WAKING)
        engine.be_without(wanted.tags)
        self._states.move(WorkerState.ASLEEP if asleep else WorkerState.IDLE)
        return True
