"""The version of the weights that all ranks are to have, and how it becomes another. Pure; owned by core.py.

An update has two halves. First all workers of all ranks read the new weights and change nothing; what one of them cannot have is
refused with its words. Only then is the version the mesh's, before any rank is asked to take it: whatever dies from here on comes back
with it. If a rank cannot take it all the same, the weights before become the next version.

A rank that says of itself that it has another version gets no requests and is asked to take the mesh's. One that has a newer one than
was ever heard of, by a call into its workers, gives it to the mesh: the others cannot read it, and say so.

A trainer may take its time between the halves (BeginUpdate, StageWeights, FinishUpdate). Others are refused meanwhile. One that sends
tensors (StageTensors, as often as it takes) has them received into a folder in the host's memory, by workers that go on with their
steps; FinishUpdate has all workers check that folder, and then take it, as any other. The first worker that fails or dies while tensors
come ends that for all.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, json
from msgspec.structs import replace

from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.routing import Router
from meshlm.protocol import operations as ops
from meshlm.protocol.edges.admit import Load
from meshlm.protocol.operations import CheckWeights, Operation, OperationDone, OperationId, UseWeights
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import COORDINATOR, Identity
from meshlm.runtime.process.events import Send

ASK_AGAIN_S = 30.0  # a rank of another version, which has not followed
BEGIN_FIRST = "no weight update was begun: POST /start_weight_update comes first"


class _Trainer(Struct):
    """Whoever began an update, and what it has staged."""

    since: float
    folder: str  # of the tensors that are sent
    staged: tuple[str, str] | None = None  # source and digest
    num_received: int = 0  # files in the folder


class _Update(Struct):
    """What ranks are asked for, on behalf of `asker`. `before`: the version that was, once there is a new one."""

    asker: Identity
    operation: Operation
    source: str
    before: WeightsVersion | None = None


class Weights:
    """`current` is the mesh's version; `ask` asks all ranks for an operation, whose answer comes to `heard`; `ranks` are those
    that are there. received: a folder in the host's memory, for tensors that are sent."""

    def __init__(
        self,
        current: WeightsVersion,
        ask: Callable[[Operation, float], list[Send]],
        ranks: Mapping[Identity, Rank],
        received: str = "",
    ) -> None:
        self.current = current
        self._ask, self._ranks, self._received = ask, ranks, received
        self._start = current.source
        self._highest = current.number
        self._trainer: _Trainer | None = None
        self._update: _Update | None = None
        self._asked_at: dict[Identity, tuple[WeightsVersion, float]] = {}

    @property
    def updating(self) -> str:
        """What is being done, in words; empty: nothing."""
        if self._update is not None:
            doing = "receiving" if self._receives else "checking" if self._update.before is None else "taking"
            return f"{doing} weights of {self._update.source}"
        return "a trainer updates the weights" if self._trainer is not None else ""

    @property
    def changes(self) -> bool:
        """Whether ranks are about to take another version."""
        return self._update is not None and self._update.before is not None

    @property
    def _receives(self) -> bool:
        return self._update is not None and isinstance(self._update.operation.action, ops.StageTensors)

    # --- what is asked ---

    def asked(self, asker: Identity, operation: Operation, now: float) -> list[Send]:
        """An operation of ops.OfCoordinator."""
        update = self._update
        if update is not None:
            if update.operation.id == operation.id:
                return []
            if self._receives and isinstance(operation.action, ops.FinishUpdate) and operation.action.drop:
                self._update = self._trainer = None
                told = _answer(update.asker, update.operation, "the weight update was dropped")
                return [*told, *self._end_transfer(operation), *_answer(asker, operation)]
            return _answer(asker, operation, f"another update of the weights is under way: {self.updating}")
        match operation.action:
            case ops.NameWeights(name=name):
                self.current = replace(self.current, name=name)
                return _answer(asker, operation)
            case ops.BeginUpdate() | ops.UpdateWeights() if self._trainer is not None:
                since = f"since {now - self._trainer.since:.0f} s"
                text = f"another trainer updates the weights {since}; POST /finish_weight_update ends it"
                return _answer(asker, operation, text)
            case ops.BeginUpdate():
                self._trainer = _Trainer(now, f"{self._received}/{operation.id}")
                return [*self._end_transfer(operation), *_answer(asker, operation)]
            case ops.UpdateWeights(source=source):
                return self._check(asker, operation, source or self.current.source or self._start, now)
            case _ if self._trainer is None:
                return _answer(asker, operation, BEGIN_FIRST)
            case ops.StageWeights(source=source):
                return self._check(asker, operation, source, now)
            case ops.StageTensors(info=info):
                return self._receive(self._trainer, asker, operation, info, now)
            case ops.FinishUpdate(name=name, keep_kv=keep_kv, drop=drop):
                staged, folder, num = self._trainer.staged, self._trainer.folder, self._trainer.num_received
                self._trainer = None
                if num and not drop:
                    return self._check(asker, operation, folder, now)
                if drop or staged is None:
                    self.current = self.current if drop or not name else replace(self.current, name=name)
                    return [*self._end_transfer(operation), *_answer(asker, operation)]
                self._update = _Update(asker, operation, staged[0])
                return self._take(self._update, staged[1], name, keep_kv, now)
        raise TypeError(f"no operation on weights: {operation.action}")

    def _check(self, asker: Identity, operation: Operation, source: str, now: float) -> list[Send]:
        self._update = _Update(asker, operation, source)
        return self._ask(Operation(OperationId(f"{operation.id}-check"), CheckWeights(source)), now)

    def _receive(self, trainer: _Trainer, asker: Identity, operation: Operation, info: bytes, now: float) -> list[Send]:
        if trainer.staged is not None:
            return _answer(asker, operation, "update_info: this update is of a folder already; finish it first")
        self._update = _Update(asker, operation, trainer.folder)
        action = ops.ReceiveWeights(trainer.folder, trainer.num_received, info)
        return self._ask(Operation(OperationId(f"{operation.id}-receive"), action), now)

    def _end_transfer(self, operation: Operation) -> list[Send]:
        """What was received is forgotten, unless it is what the mesh has."""
        end = Operation(OperationId(f"{operation.id}-end"), ops.EndTransfer(self.current.source))
        return [Send(rank, end) for rank in self._ranks] if self._received else []

    def _take(self, update: _Update, digest: str, name: str, keep_kv: bool, now: float) -> list[Send]:
        update.before, self._highest = self.current, self._highest + 1
        self.current = WeightsVersion(self._highest, name, update.source, digest)
        return self._ask(Operation(OperationId(f"{update.operation.id}-use"), UseWeights(self.current, keep_kv)), now)

    # --- what ranks answer ---

    def heard(self, sends: list[Send], now: float) -> list[Send]:
        """The messages that are for others, and what follows from answers among them to what the coordinator itself has asked."""
        while self._update is not None and (mine := [send.message for send in sends if send.to == COORDINATOR]):
            sends = [send for send in sends if send.to != COORDINATOR]
            for message in mine:
                assert isinstance(message, OperationDone)
                sends += self._done(message, now)
        return sends

    def _done(self, done: OperationDone, now: float) -> list[Send]:
        """All ranks have answered."""
        update = self._update
        if update is None or not done.id.startswith(update.operation.id):
            return []
        if self._receives and not done.error and self._trainer is not None:
            self._update = None
            self._trainer.num_received += 1
            return _answer(update.asker, update.operation)
        if update.before is None and not done.error:
            return self._checked(update, {json.decode(one, type=str) for one in done.results}, now)
        self._update = None
        if update.before is not None and done.error:
            self._highest += 1
            self.current = replace(update.before, number=self._highest)
        if self._trainer is not None and isinstance(update.operation.action, ops.StageTensors):
            self._trainer = (
                None  # what was received is not whole; a worker that is lost is no longer of the trainer's group
            )
        return [*self._end_transfer(update.operation), *_answer(update.asker, update.operation, done.error)]

    def _checked(self, update: _Update, digests: set[str], now: float) -> list[Send]:
        if len(digests) != 1:
            self._update = None
            text = f"{update.source}: hosts see different files there, or files with different times"
            return _answer(update.asker, update.operation, text)
        match update.operation.action:
            case ops.UpdateWeights(name=name, keep_kv=keep_kv) | ops.FinishUpdate(name=name, keep_kv=keep_kv):
                return self._take(update, digests.pop(), name, keep_kv, now)
        self._update = None
        if self._trainer is None:
            return _answer(update.asker, update.operation, BEGIN_FIRST)
        self._trainer.staged = (update.source, digests.pop())
        return _answer(update.asker, update.operation)

    # --- ranks ---

    def no_call(self, ranks: Iterable[Rank]) -> str:
        """Why no method of workers may be called, which might change the weights; empty: it may. All ranks begin with one version."""
        if self._update is not None:
            return f"the weights are being updated: {self.updating}"
        for rank in ranks:
            load = rank.load
            if load is not None and (load.behind or not self.current.is_same(load.weights or self.current)):
                return f"{rank.identity} has other weights than the mesh; {load.behind or 'it is about to read them'}"
        return ""

    def judged(self, load: Load) -> Load:
        """A rank's word: while it has other weights than the mesh, it serves nobody."""
        found = load.weights
        if found is not None and found.number > self._highest:
            self._highest, self.current = found.number, found
        if found is None or not load.serving or found.is_same(self.current):
            return load
        return replace(load, serving=False)

    def judge_all(self, router: Router) -> None:
        """The mesh is to have another version: no rank serves that does not have it, and what they have computed is of no use."""
        for rank in router.ranks.values():
            if rank.load is not None:
                router.load(rank, replace(self.judged(rank.load), ended=(), started=(), returned=()))

    def catch_up(self, ranks: Mapping[Identity, Rank], now: float) -> list[Send]:
        """Asks ranks of another version, or that call it otherwise, to take the mesh's; each after a while again."""
        if self._update is not None:
            return []
        sends: list[Send] = []
        for identity, rank in ranks.items():
            found = None if rank.load is None else rank.load.weights
            if found is None or found == self.current:
                continue
            version, at = self._asked_at.get(identity, (None, 0.0))
            if version != self.current or now >= at + ASK_AGAIN_S:
                self._asked_at[identity] = self.current, now
                name = f"weights-{self.current.number}-{rank.incarnation}-{now:.3f}"
                sends.append(Send(identity, Operation(OperationId(name), UseWeights(self.current))))
        return sends


def _answer(asker: Identity, operation: Operation, error: str = "") -> list[Send]:
    return [] if asker == COORDINATOR else [Send(asker, OperationDone(operation.id, error))]
