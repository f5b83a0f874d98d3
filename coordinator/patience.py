"""How long the mesh waits for a trainer's next call. Pure; owned by core.py.

A trainer that died has left what it began: its turn to update the weights, and the pause that it asked for. After `limit_s` without a
call of any trainer both are over, and requests that were paused go on with the weights that there are. A pause is a trainer's where one
had its turn while the mesh was paused, and, on a mesh that trainers send weights to, in any case; others last until /resume.
"""

import math
from collections.abc import Callable

from meshlm.coordinator.frontends import Frontends
from meshlm.coordinator.weights import Weights
from meshlm.protocol import operations as ops
from meshlm.protocol.operations import Operation, OperationId
from meshlm.protocol.wire.ids import COORDINATOR, Identity
from meshlm.runtime.process.events import Send

Call = ops.OfCoordinator | ops.JoinTrainer | ops.Pause | ops.Resume


class Patience:
    """`ask` has all ranks do an operation. `limit_s` and `all_pauses` (every pause is a trainer's) are settings."""

    def __init__(
        self, weights: Weights, frontends: Frontends, ask: Callable[[Identity, Operation, float], list[Send]]
    ) -> None:
        self.limit_s, self.all_pauses = math.inf, False
        self._weights, self._frontends, self._ask = weights, frontends, ask
        self._heard_at: float | None = None
        self._is_trainers = False  # the pause that there is
        self.given_up: tuple[str, ...] = ()  # what was left, each time that somebody was given up

    def heard(self, action: ops.Action, now: float) -> None:
        if isinstance(action, Call):
            self._heard_at = now

    def look(self, now: float) -> list[Send]:
        """Gives a trainer up that calls no more. What is done for it just now is no silence, nor is a sleep."""
        has_turn, is_paused = self._weights.has_turn, self._frontends.paused
        self._is_trainers = is_paused and (self._is_trainers or has_turn or self.all_pauses)
        if self._heard_at is None or self._weights.is_busy or self._frontends.asleep:
            self._heard_at = now
        if now - self._heard_at <= self.limit_s or not (has_turn or self._is_trainers):
            return []
        left = " and ".join([*(["its update"] if has_turn else []), *(["a pause"] if self._is_trainers else [])])
        why = f"a trainer has called nothing for {self.limit_s:g} s (--trainer-timeout), and left {left}"
        self.given_up, self._heard_at = (*self.given_up, why), now
        effects = self._weights.give_up(why)
        if self._is_trainers:
            effects += self._ask(COORDINATOR, Operation(OperationId(f"resume-{now:.3f}"), ops.Resume()), now)
        return effects
