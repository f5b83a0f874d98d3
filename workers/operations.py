"""Operations: what a worker does between two steps because it was asked to. Used by the stepper thread only (io.py)."""

from collections.abc import Callable
from typing import assert_never

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.operations import (
    AbortRunning,
    CallWorkers,
    Operation,
    OperationDone,
    OperationId,
    Pause,
    Profile,
    RebalanceExperts,
    ResetPrefixCache,
    Resume,
    Sleep,
    Stop,
    WakeUp,
)
from meshlm.protocol.wire.ids import Identity
from meshlm.workers.extension import NONE, Extension
from meshlm.workers.profiler import Profiler

MAX_KNOWN = 64  # answers that are kept for who asks again


class Operations:
    """Each operation is done once in the life of the worker."""

    def __init__(
        self, config: MeshConfig, identity: Identity, rebalance: Callable[[], str], extension: Extension | None = None
    ) -> None:
        """rebalance: see `Engine`."""
        self._extension = extension
        node = config.node
        host = (
            f"{node.host}:" if node is not None and node.index else ""
        )  # files of other nodes are told from the head's
        self._profiler = Profiler(config.worker.profiler_dir, f"{identity.role.value}-{identity.index}", host)
        self._rebalance = rebalance
        self._done: dict[OperationId, OperationDone] = {}

    def do(self, operation: Operation) -> OperationDone:
        """The answer, or the same again where it was done already."""
        done = self._done.get(operation.id)
        if done is None:
            self._done[operation.id] = done = self._do(operation)
            if len(self._done) > MAX_KNOWN:
                del self._done[next(iter(self._done))]
        return done

    def _do(self, operation: Operation) -> OperationDone:
        match operation.action:
            case Profile(start=start):
                return self._profiler.handle(operation.id, start=start)
            case RebalanceExperts():
                return OperationDone(operation.id, self._rebalance())
            case CallWorkers() as asked:
                if self._extension is None:
                    return OperationDone(operation.id, NONE)
                return self._extension.call(operation.id, asked)
            case Stop():  # no step is in flight any more, and none follows
                return OperationDone(operation.id)
            case Pause() | Resume() | Sleep() | WakeUp() | AbortRunning():  # the scheduler alone has a part in it
                return OperationDone(operation.id)
            case ResetPrefixCache():  # the mirror forgot it in the event loop, in order with what plans remember
                return OperationDone(operation.id)
            case _:
                assert_never(operation.action)
