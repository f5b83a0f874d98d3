"""The asker's end of operations: a frontend or the supervisor asks the coordinator, and awaits the one answer.

While the coordinator is not there an operation waits for it, HOLD_S at most. One whose coordinator dies is asked of the next one under
the same id, so that no worker does it twice.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from meshlm.protocol.operations import Action, Operation, OperationDone, OperationId, Stop, limit_s
from meshlm.protocol.wire.ids import COORDINATOR, Identity
from meshlm.runtime.errors import LinkDown

HOLD_S = 20.0  # a coordinator is back in a few
MORE_S = 60.0  # than the coordinator gives the ranks, of which it waits for those that are away as we for it


@dataclass(slots=True)
class _Waiting:
    operation: Operation
    future: asyncio.Future[OperationDone]
    given_up: asyncio.TimerHandle | None = None  # runs while there is no coordinator


class AskedOperations:
    """`send` is Mesh.send, or raises LinkDown as that does."""

    def __init__(self, send: Callable[[Identity, Struct], None]) -> None:
        self._send = send
        self._waiting: dict[OperationId, _Waiting] = {}

    async def ask(self, action: Action) -> OperationDone:
        """Have it done in all workers. What went wrong is in the answer's `error`; TimeoutError."""
        operation = Operation(OperationId(uuid.uuid4().hex), action)
        waiting = _Waiting(operation, asyncio.get_running_loop().create_future())
        self._waiting[operation.id] = waiting
        try:
            self._try(waiting)
            return await asyncio.wait_for(waiting.future, limit_s(action) + MORE_S)
        finally:
            self._hold_no_more(waiting)
            del self._waiting[operation.id]

    def answered(self, done: OperationDone) -> None:
        """The coordinator's answer; one that nobody waits for is dropped."""
        waiting = self._waiting.get(done.id)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_result(done)

    def coordinator_up(self) -> None:
        """It may be another one, which knows nothing of what was asked."""
        for waiting in list(self._waiting.values()):
            self._hold_no_more(waiting)
            self._try(waiting)

    def coordinator_lost(self) -> None:
        """Whatever it was asked waits for the next one."""
        for waiting in list(self._waiting.values()):
            self._hold(waiting, "the coordinator died before it answered")

    def _try(self, waiting: _Waiting) -> None:
        try:
            self._send(COORDINATOR, waiting.operation)
        except LinkDown:
            self._hold(waiting, "the coordinator is not there")

    def _hold(self, waiting: _Waiting, error: str) -> None:
        done = OperationDone(waiting.operation.id, error)
        if isinstance(waiting.operation.action, Stop):  # the mesh does not wait with its end
            self.answered(done)
        elif waiting.given_up is None:
            waiting.given_up = asyncio.get_running_loop().call_later(HOLD_S, self.answered, done)

    def _hold_no_more(self, waiting: _Waiting) -> None:
        if waiting.given_up is not None:
            waiting.given_up.cancel()
            waiting.given_up = None
