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

Rolling, ranks take turns (rolling.py): the first one alone finds out whether the weights can be had, then each takes them when nothing
that the old ones began runs there. Both versions serve until the last rank has the new one. Where a rank cannot have it all the same,
all go back to the one before in the same way. `roll` is kept beside the version, so that a coordinator that begins goes on with it.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, json
from msgspec.structs import replace

from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.moves import MOVE_S
from meshlm.coordinator.rolling import Turns
from meshlm.coordinator.routing import Router
from meshlm.protocol import operations as ops
from meshlm.protocol.edges.admit import Load
from meshlm.protocol.operations import CheckWeights, Operation, OperationDone, OperationId, UseWeights
from meshlm.protocol.weights import Manifest, Roll, RollMode, WeightsVersion
from meshlm.protocol.wire.ids import COORDINATOR, Identity
from meshlm.runtime.process.events import Send

ASK_AGAIN_S = 30.0  # a rank of another version, which has not followed
RETRY_S = 5.0  # a rank whose turn it is, and that was lost with the question
IN_TURN = ops.StageWeights | ops.StageTensors | ops.FinishUpdate
BEGIN_FIRST = "no weight update was begun: POST /start_weight_update comes first"


class _Trainer(Struct):
    """Whoever began an update, and what it has staged."""

    since: float
    folder: str  # of the tensors that are sent
    rolling: bool = False
    staged: tuple[str, str] | None = None  # source and digest
    num_received: int = 0  # files in the folder


class _Update(Struct):
    """What ranks are asked for, on behalf of `asker`. `before`: the version that was, once there is a new one. rolling: the ranks one
    after another."""

    asker: Identity
    operation: Operation
    source: str
    before: WeightsVersion | None = None
    rolling: RollMode | None = None


class Weights:
    """`current` is the mesh's version; `ask` asks all ranks for an operation, or one, and the answer comes to `heard`. why_not: what
    keeps ranks from taking turns, in words. received: a folder in the host's memory, for tensors that are sent."""

    def __init__(
        self,
        manifest: Manifest,
        ask: Callable[[Operation, float, Identity | None], list[Send]],
        turns: Turns,
        why_not: Callable[[], str],
        received: str = "",
    ) -> None:
        self.current, self.roll = current, roll = manifest.version, manifest.roll
        self.turns, self._why_not = turns, why_not
        self._ask, self._ranks, self._received = ask, turns.ranks, received
        self._start = current.source
        self._highest = current.number
        self._trainer: _Trainer | None = None
        self._given_up = ""  # why the last trainer's turn is over, which it does not know
        self._joining: OperationId | None = None  # of a trainer, while another one has its turn
        self._update: _Update | None = None
        self._asked_at: dict[Identity, tuple[WeightsVersion, float]] = {}
        if roll is not None:  # another coordinator began it
            self._highest = max(self._highest, *(one.number for one in roll.others))
            operation = Operation(OperationId(f"roll-{current.number}"), ops.UpdateWeights(current.source))
            before = roll.others[0]
            self._update = _Update(COORDINATOR, operation, current.source, before, roll.mode)
            turns.begin(roll.mode, self._labels(), MOVE_S)

    @property
    def manifest(self) -> Manifest:
        """What is kept of it, for whoever begins."""
        return Manifest(self.current, self.roll)

    @property
    def updating(self) -> str:
        """What is being done, in words; empty: nothing."""
        if self._update is not None:
            doing = "receiving" if self._receives else "checking" if self._update.before is None else "taking"
            rolls = f", {self.turns.words(self._needs)}" if self._update.rolling is not None else ""
            return f"{doing} weights of {self._update.source}{rolls}"
        return "a trainer updates the weights" if self._trainer is not None else ""

    @property
    def changes(self) -> bool:
        """Whether all ranks are about to take another version."""
        return self._update is not None and self._update.before is not None and self._update.rolling is None

    @property
    def _receives(self) -> bool:
        return self._update is not None and isinstance(self._update.operation.action, ops.StageTensors)

    @property
    def has_turn(self) -> bool:  # a trainer has begun an update
        return self._trainer is not None

    @property
    def is_busy(self) -> bool:  # ranks do something for an update
        return self._update is not None

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
        if self._trainer is None and self._given_up and isinstance(operation.action, IN_TURN):
            return _answer(asker, operation, f"{BEGIN_FIRST}; {self._given_up}")
        match operation.action:
            case ops.NameWeights(name=name):
                self.current = replace(self.current, name=name)
                return _answer(asker, operation)
            case ops.BeginUpdate() | ops.UpdateWeights() if self._trainer is not None:
                since = f"since {now - self._trainer.since:.0f} s"
                text = f"another trainer updates the weights {since}; POST /finish_weight_update ends it"
                return _answer(asker, operation, text)
            case ops.BeginUpdate(rolling=rolling):
                if why := self._why_not() if rolling else "":
                    return _answer(asker, operation, why)
                self._trainer, self._given_up = _Trainer(now, f"{self._received}/{operation.id}", rolling), ""
                return [*self._end_transfer(operation), *_answer(asker, operation)]
            case ops.UpdateWeights(source=source, name=name, rolling=mode):
                if mode is not None and (why := self._why_not() or self._same_name(name)):
                    return _answer(asker, operation, why)
                return self._check(asker, operation, source or self.current.source or self._start, now, mode)
            case _ if self._trainer is None:
                return _answer(asker, operation, BEGIN_FIRST)
            case ops.StageWeights(source=source):
                return self._check(asker, operation, source, now, "wait" if self._trainer.rolling else None)
            case ops.StageTensors(info=info):
                return self._receive(self._trainer, asker, operation, info, now)
            case ops.FinishUpdate(name=name, keep_kv=keep_kv, drop=drop, rolling=mode):
                if mode is not None and (why := self._why_not() or self._same_name(name)):
                    return _answer(asker, operation, why)
                staged, folder, num = self._trainer.staged, self._trainer.folder, self._trainer.num_received
                self._trainer = None
                if num and not drop:
                    return self._check(asker, operation, folder, now, mode)
                if drop or staged is None:
                    self.current = self.current if drop or not name else replace(self.current, name=name)
                    return [*self._end_transfer(operation), *_answer(asker, operation)]
                self._update = _Update(asker, operation, staged[0], rolling=mode)
                return self._take(self._update, staged[1], name, keep_kv, now)
        raise TypeError(f"no operation on weights: {operation.action}")

    def joining(self, operation: Operation) -> Operation:
        """A trainer that would be joined: while another one has its turn only if that one is gone, whose turn is over then."""
        if self._trainer is None or not isinstance(operation.action, ops.JoinTrainer):
            return operation
        self._joining = operation.id
        return Operation(operation.id, ops.JoinTrainer(operation.action.info, if_gone=True))

    def give_up(self, why: str) -> list[Send]:
        """The trainer's turn is over: what it has sent is forgotten, and another one may begin."""
        if self._trainer is None or self._update is not None:
            return []
        self._trainer, self._given_up = None, why
        return self._end_transfer(Operation(OperationId(f"{self._highest}-given-up"), ops.FinishUpdate(drop=True)))

    def _check(
        self, asker: Identity, operation: Operation, source: str, now: float, mode: RollMode | None = None
    ) -> list[Send]:
        self._update = _Update(asker, operation, source, rolling=mode)
        if mode is not None:
            self.turns.begin(mode, self._labels())
            return []  # when a rank's turn has come
        return self._ask(Operation(OperationId(f"{operation.id}-check"), CheckWeights(source)), now, None)

    def _receive(self, trainer: _Trainer, asker: Identity, operation: Operation, info: bytes, now: float) -> list[Send]:
        if trainer.staged is not None:
            return _answer(asker, operation, "update_info: this update is of a folder already; finish it first")
        self._update = _Update(asker, operation, trainer.folder)
        action = ops.ReceiveWeights(trainer.folder, trainer.num_received, info, self.current)
        return self._ask(Operation(OperationId(f"{operation.id}-receive"), action), now, None)

    def _end_transfer(self, operation: Operation) -> list[Send]:
        """What was received is forgotten, unless it is what the mesh has."""
        end = Operation(OperationId(f"{operation.id}-end"), ops.EndTransfer(self.current.source))
        return [Send(rank, end) for rank in self._ranks] if self._received else []

    def _take(self, update: _Update, digest: str, name: str, keep_kv: bool, now: float) -> list[Send]:
        update.before, self._highest = self.current, self._highest + 1
        self.current = WeightsVersion(self._highest, name, update.source, digest)
        if update.rolling is not None:
            self._begin_roll(update.rolling, (update.before,))
            return []
        self.turns.forget()
        use = Operation(OperationId(f"{update.operation.id}-use"), UseWeights(self.current, keep_kv))
        return self._ask(use, now, None)

    # --- ranks take turns ---

    def _same_name(self, name: str) -> str:
        """Why a roll may not give this name: by their names its two versions are told apart."""
        label = name or str(self._highest + 1)
        why = f"weight_version: the mesh's weights are called {label!r} already; rolling needs another name"
        return why if label == self.current.label else ""

    def _labels(self) -> set[str]:
        others = self.roll.others if self.roll is not None else ()
        return {self.current.label, *(one.label for one in others)}

    def _begin_roll(self, mode: RollMode, others: tuple[WeightsVersion, ...], *, is_back: bool = False) -> None:
        self.roll = Roll(others, mode, is_back)
        self.turns.begin(mode, self._labels())
        self.turns.once_more()

    def _needs(self, rank: Rank) -> bool:
        """Whether the rank has yet to take the mesh's version. One that cannot even go back stays out."""
        if self.roll is None or rank.weights is None or not rank.weights.is_same(self.current):
            return True
        if rank.behind:
            return not self.roll.is_back
        return rank.identity == self.turns.at and not rank.serving

    def go_on(self, ranks: Mapping[Identity, Rank], now: float) -> list[Send]:
        """The next turn, or what is next in this one."""
        update = self._update
        if update is None or update.rolling is None:
            return []
        at = ranks.get(self.turns.at) if self.turns.at is not None else None
        sends: list[Send] = []
        goes_on = self.roll is None or self.roll.is_back
        if not goes_on and at is not None and at.behind and at.weights is not None and at.weights.is_same(self.current):
            sends = self._go_back(update, at.behind)
        told, asked = self.turns.go_on(self._needs, now)
        sends += told
        if asked is not None:
            name, is_check = f"{update.operation.id}-{asked.number}-{now:.3f}", update.before is None
            action = CheckWeights(update.source) if is_check else UseWeights(self.current)
            sends += self._ask(Operation(OperationId(name), action), now, asked.identity)
        if self.roll is not None and self.turns.at is None and self._all_have_it(ranks):
            self._update = self.roll = None
            self.turns.end(self.current.label)
            sends += [*self._end_transfer(update.operation), *_answer(update.asker, update.operation)]
        return sends

    def _all_have_it(self, ranks: Mapping[Identity, Rank]) -> bool:
        there = [rank for rank in ranks.values() if not rank.retiring]
        return len(there) >= self.turns.num_ranks and not any(self._needs(rank) for rank in there)

    def _go_back(self, update: _Update, why: str) -> list[Send]:
        """A rank cannot have the new version: the one before, under the name that its requests know, is the next."""
        assert update.before is not None
        assert self.roll is not None
        self._highest += 1
        failed, self.current = self.current, replace(update.before, number=self._highest, name=update.before.label)
        asker, update.asker, update.source = update.asker, COORDINATOR, self.current.source
        self._begin_roll(self.roll.mode, (update.before, failed), is_back=True)
        return _answer(asker, update.operation, why)

    # --- what ranks answer ---

    def heard(self, sends: list[Send], now: float) -> list[Send]:
        """The messages that are for others, and what follows from answers among them to what the coordinator itself has asked."""
        for send in sends:
            done = send.message
            if isinstance(done, OperationDone) and done.id == self._joining:
                self._joining = None
                sends = [
                    *sends,
                    *(self.give_up("its trainer was gone, and another one joined") if not done.error else ()),
                ]
        while self._update is not None and (mine := [send.message for send in sends if send.to == COORDINATOR]):
            sends = [send for send in sends if send.to != COORDINATOR]
            for message in mine:
                assert isinstance(message, OperationDone)
                sends += self._done(message, now)
        return [send for send in sends if send.to != COORDINATOR]

    def _done(self, done: OperationDone, now: float) -> list[Send]:
        """All ranks have answered."""
        update = self._update
        if update is None or not done.id.startswith(update.operation.id):
            return []
        if self._receives and not done.error and self._trainer is not None:
            self._update = None
            self._trainer.num_received += 1
            return _answer(update.asker, update.operation)
        if self.roll is not None:  # a rank's own word says what became of its turn
            if done.error:
                self.turns.once_more(now + RETRY_S)
            return []
        if update.before is None and not done.error:
            return self._checked(update, {json.decode(one, type=str) for one in done.results}, now)
        self._end_update()
        if update.before is not None and done.error:
            self._highest += 1
            self.current = replace(update.before, number=self._highest)
        if self._trainer is not None and isinstance(update.operation.action, ops.StageTensors):
            self._trainer = None  # what was received is not whole, and a worker that is lost is in no group
        return [*self._end_transfer(update.operation), *_answer(update.asker, update.operation, done.error)]

    def _checked(self, update: _Update, digests: set[str], now: float) -> list[Send]:
        if len(digests) != 1:
            self._end_update()
            text = f"{update.source}: hosts see different files there, or files with different times"
            return _answer(update.asker, update.operation, text)
        match update.operation.action:
            case ops.UpdateWeights(name=name, keep_kv=keep_kv) | ops.FinishUpdate(name=name, keep_kv=keep_kv):
                return self._take(update, digests.pop(), name, keep_kv, now)
        self._end_update()
        if self._trainer is None:
            return _answer(update.asker, update.operation, BEGIN_FIRST)
        self._trainer.staged = (update.source, digests.pop())
        return _answer(update.asker, update.operation)

    def _end_update(self) -> None:
        if self._update is not None and self._update.rolling is not None:
            self.turns.end()
        self._update = None

    # --- ranks ---

    def not_now(self, action: ops.Action, ranks: Iterable[Rank]) -> str:
        """Why this may not be done now; empty: it may. A method that workers call might change the weights: all ranks begin with one
        version. Ranks that sleep would never have their turns."""
        if isinstance(action, ops.JoinTrainer) and self._receives:
            return f"another trainer sends weights: {self.updating}"
        if not isinstance(action, ops.CallWorkers | ops.Sleep):
            return ""
        if self._update is not None and (isinstance(action, ops.CallWorkers) or self._update.rolling is not None):
            return f"the weights are being updated: {self.updating}"
        if isinstance(action, ops.Sleep):
            return ""
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
        if found is None or not load.serving or found.is_same(self.current) or self._serves_beside(found):
            return load
        return replace(load, serving=False)

    def _serves_beside(self, found: WeightsVersion) -> bool:
        """Whether it may serve beside the mesh's version, until it is its rank's turn."""
        return self.roll is not None and any(found.is_same(one) for one in self.roll.others)

    def judge_all(self, router: Router) -> None:
        """The mesh is to have another version: no rank serves that does not have it, and what they have computed is of no use."""
        for rank in router.ranks.values():
            if rank.load is not None:
                router.load(rank, replace(self.judged(rank.load), ended=(), started=(), returned=()))

    def catch_up(self, ranks: Mapping[Identity, Rank], now: float) -> list[Send]:
        """Asks ranks of another version, or that call it otherwise, to take the mesh's; each after a while again."""
        if self._update is not None and self.roll is None:
            return []
        sends: list[Send] = []
        for identity, rank in ranks.items():
            found = rank.weights
            if found is None or found == self.current or self._serves_beside(found) or identity == self.turns.at:
                continue
            version, at = self._asked_at.get(identity, (None, 0.0))
            if version != self.current or now >= at + ASK_AGAIN_S:
                self._asked_at[identity] = self.current, now
                name = f"weights-{self.current.number}-{rank.incarnation}-{now:.3f}"
                sends.append(Send(identity, Operation(OperationId(name), UseWeights(self.current))))
        return sends


def _answer(asker: Identity, operation: Operation, error: str = "") -> list[Send]:
    return [] if asker == COORDINATOR else [Send(asker, OperationDone(operation.id, error))]
