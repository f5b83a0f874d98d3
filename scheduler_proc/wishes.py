"""What the workers of a rank are to be: which of their memory is away (sleep), and which weights they have. Pure; owned by core.py.

Workers become so at the beginning of a session, when no step is in flight: a wish makes a new one, in which all of them get it with the
Reset. It is answered when they are as it says. Whatever dies meanwhile, the next session has the same wish. A newer wish of the same
kind takes the place of an older one.
"""

from collections.abc import Iterable

from meshlm.protocol.operations import CheckWeights, OfTransfer, Operation, Sleep, SumWeights, UseWeights, WakeUp
from meshlm.protocol.sleeping import AWAKE, WEIGHTS, after
from meshlm.protocol.weights import WeightsVersion
from meshlm.runtime.process.events import Send
from meshlm.scheduler_proc.operations import Operations
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.states import Session
from meshlm.scheduler_proc.workers import Workers

Wish = Sleep | WakeUp | UseWeights
OF_WEIGHTS = CheckWeights | SumWeights | OfTransfer
RETRY_S = 10.0  # how often workers that could not read the mesh's weights try again


class Wishes:
    """`workers` and `operations` are the core's."""

    def __init__(self, workers: Workers, operations: Operations) -> None:
        self._workers, self._operations = workers, operations
        self._retry_at = 0.0
        self.keeps_kv = False  # of requests that have begun, when the weights change next
        self._keyed = WeightsVersion()  # those by which requests are keyed

    def take(self, operation: Operation, wish: Wish) -> tuple[list[Send], bool]:
        """What is said at once, and whether a new session is to begin."""
        if operation.id in self._operations.pending:  # asked again, since the coordinator lost sight of this process
            return [], False
        told = self._overtaken(wish)
        self._operations.add(operation)
        if self._take_weights(wish) if isinstance(wish, UseWeights) else self._take_sleep(wish):
            return told, True
        return [*told, *self._operations.answer(operation)], False

    def _take_sleep(self, wish: Sleep | WakeUp) -> bool:
        workers = self._workers
        before, workers.sleeping = workers.sleeping, after(workers.sleeping or AWAKE, wish)
        has_it = workers.rank.session in (Session.SERVING, Session.ASLEEP) and workers.sleeping == before
        return not has_it

    def _take_weights(self, wish: UseWeights) -> bool:
        workers = self._workers
        before, workers.weights = workers.weights, wish.version
        has_it = workers.rank.session in (Session.SERVING, Session.ASLEEP) and not workers.behind
        self.keeps_kv = wish.keep_kv
        if has_it and before is not None and before.is_same(wish.version):
            return False
        workers.behind = ""  # of what it is to have now, nothing is known
        return True

    def _overtaken(self, wish: Wish) -> list[Send]:
        """The answers to those whose place this one takes."""
        is_update, pending = isinstance(wish, UseWeights), self._operations.pending.values()
        text = "another update of the weights" if is_update else "another call to sleep or to wake up"
        wishes = [one for one in pending if isinstance(one.action, Wish)]
        older = [one for one in wishes if isinstance(one.action, UseWeights) is is_update]
        return [send for one in older for send in self._operations.answer(one, f"{text} followed")]

    def may_check(self) -> bool:
        """Whether the workers can be asked for operations on their weights: they are there, though the KV cache may sleep."""
        workers, session = self._workers, self._workers.rank.session
        if session is Session.ASLEEP:
            return workers.sleeping is not None and WEIGHTS not in workers.sleeping.tags
        return session in (Session.SERVING, Session.BEHIND)

    def settled(self, now: float) -> list[Send]:
        """All workers have answered, and no step may follow: they sleep as they are to, or are behind. Weights that are away are read
        when they are wanted back."""
        behind, is_asleep = self._workers.behind, self._workers.rank.session is Session.ASLEEP
        self._retry_at = now + RETRY_S
        sends: list[Send] = []
        for one in list(self._operations.pending.values()):
            if isinstance(one.action, Wish):
                is_done = is_asleep and not isinstance(one.action, UseWeights)
                sends += self._operations.answer(one, "" if is_done else behind)
            elif isinstance(one.action, OF_WEIGHTS) and self.may_check():
                sends += self._operations.send(one)
        return sends

    def may_do(self, operation: Operation) -> bool:
        """Whether the workers can do it, although no step may follow."""
        return isinstance(operation.action, OF_WEIGHTS) and self.may_check()

    def retries(self, now: float) -> bool:
        """Whether it is time to have workers try once more."""
        return self._workers.rank.session is Session.BEHIND and now >= self._retry_at

    def changed_by_call(self, version: WeightsVersion) -> None:
        """A method of the worker extension has changed the weights."""
        self._workers.weights, self.keeps_kv = version, False

    def rekey(self, requests: Iterable[Request]) -> None:
        """Where the weights are others than before, what was computed is of no use to requests that do not keep it, and each says anew
        which weights compute it. Called when none is running."""
        weights, keeps = self._workers.weights or self._keyed, self.keeps_kv
        if weights == self._keyed:
            return
        self._keyed, self.keeps_kv = weights, False
        for request in requests:
            if not (keeps and request.has_begun):
                request.extra_keys = request.extra_keys._replace(weights=weights.key)
                request.hashes = []
            if request.num_cached == TOLD:
                request.num_cached = max(0, request.num_reused)


TOLD = -2  # of Request.num_cached
