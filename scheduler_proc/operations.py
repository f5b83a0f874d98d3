"""Operations that the workers of this rank have not all answered. Pure; owned by core.py.

Each goes to all workers between the same two plans. When the workers' session ends before all have answered, it goes to all of them
again at the beginning of the next session: those that have done it answer at once. What all must do together with a trainer (OnlyOnce)
is over then, and as soon as one of them has failed.
"""

from meshlm.protocol.operations import CallWorkers, OnlyOnce, Operation, OperationDone, OperationId, combine
from meshlm.protocol.wire.ids import COORDINATOR, Identity
from meshlm.runtime.process.events import Send

SESSION_ENDED = "a worker was lost, or its session ended; POST /init_weight_transfer_engine joins the workers again"


class Operations:
    """`pending` are in the order in which they came."""

    def __init__(self, workers: list[Identity]) -> None:
        self._workers = workers
        self._answers: dict[OperationId, dict[Identity, OperationDone]] = {}
        self.pending: dict[OperationId, Operation] = {}

    def add(self, operation: Operation) -> None:
        """It has to be done; `send` follows as soon as the workers serve."""
        self.pending[operation.id] = operation

    def send(self, operation: Operation) -> list[Send]:
        """All workers do it now; what they answered in an earlier session does not count."""
        self._answers[operation.id] = {}
        return [Send(worker, operation) for worker in self._workers]

    def answer(self, operation: Operation, error: str = "", count: int = 0) -> list[Send]:
        """It is done here, or cannot be; no worker is asked."""
        return self._over(OperationDone(operation.id, error, count=count))

    @property
    def holds_steps(self) -> bool:
        """Whether no step may follow before the workers have answered: a method that they call may change their weights."""
        return bool(self._answers) and any(isinstance(self.pending[one].action, CallWorkers) for one in self._answers)

    def lose_workers(self) -> list[Send]:
        """The session has ended."""
        over = [one for one in self._answers if isinstance(self.pending[one].action, OnlyOnce)]
        return [send for one in over for send in self._over(OperationDone(one, SESSION_ENDED))]

    def answered(self, worker: Identity, done: OperationDone) -> list[Send]:
        """A worker's answer; one that nobody waits for is dropped."""
        answers = self._answers.get(done.id)
        if answers is None:
            return []
        if done.error and isinstance(self.pending[done.id].action, OnlyOnce):
            return self._over(done)
        answers[worker] = done
        if len(answers) < len(self._workers):
            return []
        return self._over(combine(done.id, [answers[one] for one in self._workers]))

    def _over(self, done: OperationDone) -> list[Send]:
        del self.pending[done.id]
        self._answers.pop(done.id, None)
        return [Send(COORDINATOR, done)]
