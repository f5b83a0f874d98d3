"""Operations that are not answered yet: each goes to all ranks, and its asker gets one answer. Pure; owned by core.py."""

from collections.abc import Collection

from msgspec import Struct

from meshlm.protocol.ids import Identity, Role
from meshlm.protocol.operations import Operation, OperationDone, OperationId, combine, limit_s
from meshlm.runtime.events import Send


class _Asked(Struct):
    asker: Identity
    answers: dict[Identity, OperationDone | None]  # by rank, in their order; None: it is silent yet
    limit_s: float
    until: float


class Operations:
    """See the module docstring."""

    def __init__(self) -> None:
        self._asked: dict[OperationId, _Asked] = {}

    def ask(
        self, asker: Identity, operation: Operation, ranks: Collection[Identity], num_ranks: int, now: float
    ) -> list[Send]:
        """Send it to all ranks, or to none while one of `num_ranks` is not there."""
        if operation.id in self._asked:
            return []
        for rank in (Identity(Role.SCHEDULER, number) for number in range(num_ranks)):
            if rank not in ranks:
                return [Send(asker, OperationDone(operation.id, f"{rank} is not there"))]
        limit = limit_s(operation.action)
        self._asked[operation.id] = asked = _Asked(asker, dict.fromkeys(ranks), limit, now + limit)
        return [Send(rank, operation) for rank in asked.answers]

    def answered(self, rank: Identity, done: OperationDone) -> list[Send]:
        asked = self._asked.get(done.id)
        if asked is None or rank not in asked.answers:
            return []
        asked.answers[rank] = asked.answers[rank] or done
        return self._over(done.id, asked)

    def lost(self, identity: Identity) -> list[Send]:
        """A rank or an asker is gone. What a rank was asked for may have been done, and nobody can tell."""
        effects = []
        for operation_id, asked in list(self._asked.items()):
            if asked.asker == identity:
                del self._asked[operation_id]
            else:
                effects += self.answered(identity, OperationDone(operation_id, f"{identity} died before it answered"))
        return effects

    def expire(self, now: float) -> list[Send]:
        effects = []
        for operation_id, asked in list(self._asked.items()):
            silent = [rank for rank, done in asked.answers.items() if done is None]
            for rank in silent if asked.until <= now else ():
                error = f"{rank} did not answer in {asked.limit_s:.0f} s"
                effects += self.answered(rank, OperationDone(operation_id, error))
        return effects

    def _over(self, operation_id: OperationId, asked: _Asked) -> list[Send]:
        answers = [done for done in asked.answers.values() if done is not None]
        if len(answers) < len(asked.answers):
            return []
        del self._asked[operation_id]
        return [Send(asked.asker, combine(operation_id, answers))]
