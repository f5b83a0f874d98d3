"""Everything that a worker can be stands here: what each state means, and what may follow it.

A worker begins LOADING: its stepper thread makes the engine. With --enable-sleep-mode it first asks the scheduler whether a model is
wanted here; while none is, it is UNLOADED, a process that holds nothing. Once the engine is there the worker is IDLE: it has its
memory and waits for what the scheduler sends, in order. A plan makes it STEPPING until the step is launched, an operation OPERATING
until it is done; both lead back to where they began. A Reset begins a session. In it a worker that steps together with other ranks is
MEETING them, until all have come or one was lost; either way it is IDLE then, and a Reset that was for nothing is followed by another.

A Reset may say that the worker is to sleep. It is then FALLING_ASLEEP while it gives memory back, and ASLEEP: no step can follow, no
graph is captured, but operations are done. Another Reset may name other memory, or none: then it is WAKING until the memory is there
again. Where even the host is not to keep the weights it is DROPPED: this process ends, and its successor begins UNLOADED.

Only the stepper thread moves it; others read it, for the heartbeat. A step that the device still computes is not a state of the worker:
the next one is launched meanwhile (io.py: `beat`).
"""

from enum import Enum

from meshlm.protocol.edges.control import STEPPING


class WorkerState(Enum):
    """The state of a worker."""

    LOADING = "loading"
    UNLOADED = "without a model"
    IDLE = "idle"
    STEPPING = STEPPING
    OPERATING = "operation"
    MEETING = "waiting for the other ranks"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking up"
    DROPPED = "without its weights"


_S = WorkerState
TRANSITIONS: dict[WorkerState, tuple[WorkerState, ...]] = {
    _S.LOADING: (_S.UNLOADED, _S.IDLE),
    _S.UNLOADED: (_S.UNLOADED, _S.LOADING),
    _S.IDLE: (_S.STEPPING, _S.OPERATING, _S.MEETING, _S.FALLING_ASLEEP, _S.DROPPED),
    _S.STEPPING: (_S.IDLE,),
    _S.OPERATING: (_S.IDLE, _S.ASLEEP, _S.DROPPED),
    _S.MEETING: (_S.IDLE,),
    _S.FALLING_ASLEEP: (_S.ASLEEP,),
    _S.ASLEEP: (_S.OPERATING, _S.FALLING_ASLEEP, _S.WAKING, _S.DROPPED),
    _S.WAKING: (_S.IDLE,),
    _S.DROPPED: (_S.OPERATING,),
}
SLEEPS = (WorkerState.UNLOADED, WorkerState.ASLEEP, WorkerState.DROPPED)


class InvalidTransition(Exception):
    """A bug."""


class WorkerStates:
    """`phase` is what a heartbeat tells: the state, with one word for those that sleep; while it loads, what is loaded now."""

    def __init__(self) -> None:
        self.state, self.phase = WorkerState.LOADING, WorkerState.LOADING.value

    def move(self, state: WorkerState) -> None:
        """InvalidTransition where the table has no such entry."""
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"a worker that is {self.state.value}: {state.value}")
        self.state, self.phase = state, (WorkerState.ASLEEP if state in SLEEPS else state).value
