"""Operations before which ranks that step together come to rest, so that all do them before the same step. Pure; owned by core.py.

Those that are asked for meanwhile keep their places behind them. Ranks go on when they have been asked: the operation comes to each
before the order to step.
"""

from collections.abc import Callable

from meshlm.coordinator.joint import JointGroup
from meshlm.protocol.operations import (
    Action,
    CallWorkers,
    CheckWeights,
    Operation,
    OperationDone,
    Pause,
    Sleep,
    Stop,
    UseWeights,
    WakeUp,
    limit_s,
)
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.events import Send


class Resting:
    """`ask` sends an operation of an asker to all ranks."""

    def __init__(self, group: JointGroup, ask: Callable[[Identity, Operation, float], list[Send]]) -> None:
        self._group, self._ask = group, ask
        self._waiting: list[tuple[Identity, Operation, float]] = []  # and until when

    def takes(self, action: Action) -> bool:
        """Whether it is done at rest: what changes the ranks' weights or memory, or withholds requests from them. A pause that lets
        what runs come to its end needs their steps."""
        if self._waiting:
            return True
        return isinstance(action, Stop | Sleep | WakeUp | CallWorkers | CheckWeights | UseWeights) or (
            isinstance(action, Pause) and not action.wait
        )

    def wait(self, asker: Identity, operation: Operation, now: float) -> list[Send]:
        """All ranks are to end with the same step."""
        self._waiting.append((asker, operation, now + limit_s(operation.action)))
        return self._group.pause("an operation")

    def go_on(self, now: float) -> list[Send]:
        """Ask what waits, if the ranks rest."""
        at_rest = self._group.at_rest
        if not self._waiting or not (at_rest or any(until <= now for _, _, until in self._waiting)):
            return []
        waiting, self._waiting = self._waiting, []
        effects: list[Send] = []
        for asker, operation, _ in waiting:
            if at_rest:
                effects += self._ask(asker, operation, now)
            else:
                error = f"ranks that step together did not rest in {limit_s(operation.action):.0f} s"
                effects.append(Send(asker, OperationDone(operation.id, error)))
        ends = any(isinstance(operation.action, Stop) for _, operation, _ in waiting)
        return effects if ends else [*effects, *self._group.resume()]
