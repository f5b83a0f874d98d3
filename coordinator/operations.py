"""Operations that are not answered yet: each goes to all ranks, and its asker gets one answer. Pure; owned by core.py.

While a rank is not there, because its scheduler has died, an operation waits for it, HOLD_S at most. One that was asked of a rank
that then died is asked of its next incarnation again, where doing it twice is doing it once.
"""

from collections.abc import Collection

from msgspec import Struct

from meshlm.protocol import operations as edge
from meshlm.protocol.operations import Operation, OperationDone, OperationId, Stop, combine, limit_s
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.events import Send

HOLD_S = 20.0  # a scheduler is back in a few; less than the asker's own patience (runtime/mesh/operations.py)
REPEATABLE = (
    edge.Pause
    | edge.Resume
    | edge.ResetPrefixCache
    | edge.Sleep
    | edge.WakeUp
    | edge.CheckWeights
    | edge.UseWeights
    | edge.DropAdapter
)


class _Held(Struct, frozen=True):
    """No rank was asked yet."""

    asker: Identity
    operation: Operation
    until: float


class _Asked(Struct):
    asker: Identity
    operation: Operation
    answers: dict[Identity, OperationDone | None]  # by rank, in their order; None: it is silent yet
    limit_s: float
    until: float
    gone: dict[Identity, float]  # ranks that died before they answered: until when the next incarnation is waited for


class Operations:
    """Operations by their ids: those that wait for a rank, and those that ranks were asked for."""

    def __init__(self) -> None:
        self._held: dict[OperationId, _Held] = {}
        self._asked: dict[OperationId, _Asked] = {}

    def ask(
        self, asker: Identity, operation: Operation, ranks: Collection[Identity], num_ranks: int, now: float
    ) -> list[Send]:
        """Send it to all ranks, or to none while one of `num_ranks` is not there."""
        if operation.id in self._asked or operation.id in self._held:
            return []
        if (missing := _missing(ranks, num_ranks)) is None:
            return self._send(asker, operation, ranks, now)
        if isinstance(operation.action, Stop):
            return [Send(asker, OperationDone(operation.id, f"{missing} is not there"))]
        self._held[operation.id] = _Held(asker, operation, now + HOLD_S)
        return []

    def ask_one(self, asker: Identity, operation: Operation, rank: Identity, now: float) -> list[Send]:
        """Send it to this rank alone."""
        return self._send(asker, operation, (rank,), now)

    def joined(self, rank: Identity, ranks: Collection[Identity], num_ranks: int, now: float) -> list[Send]:
        """A rank is there, or another number of them is wanted: what waited for that is asked now."""
        effects = []
        for asked in self._asked.values():  # first: they are older
            if rank in ranks and asked.gone.pop(rank, None) is not None:
                effects.append(Send(rank, asked.operation))
        if _missing(ranks, num_ranks) is None:
            held, self._held = self._held, {}
            for one in held.values():
                effects += self._send(one.asker, one.operation, ranks, now)
        return effects

    def _send(self, asker: Identity, operation: Operation, ranks: Collection[Identity], now: float) -> list[Send]:
        limit = limit_s(operation.action)
        asked = _Asked(asker, operation, dict.fromkeys(ranks), limit, now + limit, {})
        self._asked[operation.id] = asked
        return [Send(rank, operation) for rank in asked.answers]

    def answered(self, rank: Identity, done: OperationDone) -> list[Send]:
        asked = self._asked.get(done.id)
        if asked is None or rank not in asked.answers:
            return []
        if done.error and isinstance(asked.operation.action, edge.OnlyOnce):  # the others wait for what will not come
            del self._asked[done.id]
            return [Send(asked.asker, done)]
        asked.answers[rank] = asked.answers[rank] or done
        return self._over(done.id, asked)

    def lost(self, identity: Identity, now: float) -> list[Send]:
        """A rank or an asker is gone. What a rank was asked for may have been done, and nobody can tell."""
        effects = []
        self._held = {name: held for name, held in self._held.items() if held.asker != identity}
        for operation_id, asked in list(self._asked.items()):
            if asked.asker == identity:
                del self._asked[operation_id]
            elif isinstance(asked.operation.action, REPEATABLE) and asked.answers.get(identity, asked) is None:
                asked.gone[identity] = now + HOLD_S
            else:
                effects += self.answered(identity, _died(operation_id, identity))
        return effects

    def expire(self, ranks: Collection[Identity], num_ranks: int, now: float) -> list[Send]:
        effects = []
        for operation_id, held in list(self._held.items()):
            if held.until <= now:
                del self._held[operation_id]
                missing = _missing(ranks, num_ranks)
                effects.append(Send(held.asker, OperationDone(operation_id, f"{missing} is not there")))
        for operation_id, asked in list(self._asked.items()):
            for rank in [rank for rank, until in asked.gone.items() if until <= now]:
                effects += self.answered(rank, _died(operation_id, rank))
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


def _missing(ranks: Collection[Identity], num_ranks: int) -> Identity | None:
    """The first of the ranks that are wanted and not there."""
    wanted = (Identity(Role.SCHEDULER, number) for number in range(num_ranks))
    return next((rank for rank in wanted if rank not in ranks), None)


def _died(operation_id: OperationId, rank: Identity) -> OperationDone:
    return OperationDone(operation_id, f"{rank} died before it answered")
