"""The asker's end of operations: a frontend or the supervisor asks the coordinator, and awaits the one answer."""

import asyncio
import uuid
from collections.abc import Callable

from msgspec import Struct

from meshlm.protocol.ids import COORDINATOR, Identity
from meshlm.protocol.operations import Action, Operation, OperationDone, OperationId, limit_s
from meshlm.runtime.errors import LinkDown

MORE_S = 30.0  # than the coordinator gives the ranks


class AskedOperations:
    """`send` is Mesh.send, or raises LinkDown as that does."""

    def __init__(self, send: Callable[[Identity, Struct], None]) -> None:
        self._send = send
        self._waiting: dict[OperationId, asyncio.Future[OperationDone]] = {}

    async def ask(self, action: Action) -> OperationDone:
        """Have it done in all workers. What went wrong is in the answer's `error`; TimeoutError."""
        operation = Operation(OperationId(uuid.uuid4().hex), action)
        self._waiting[operation.id] = future = asyncio.get_running_loop().create_future()
        try:
            self._send(COORDINATOR, operation)
            return await asyncio.wait_for(future, limit_s(action) + MORE_S)
        except LinkDown:
            return OperationDone(operation.id, "the coordinator is not there")
        finally:
            del self._waiting[operation.id]

    def answered(self, done: OperationDone) -> None:
        """The coordinator's answer; one that nobody waits for is dropped."""
        future = self._waiting.get(done.id)
        if future is not None and not future.done():
            future.set_result(done)

    def coordinator_lost(self) -> None:
        """Nobody will answer."""
        for operation_id in list(self._waiting):
            self.answered(OperationDone(operation_id, "the coordinator died before it answered; ask again"))
