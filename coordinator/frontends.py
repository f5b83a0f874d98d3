"""What frontends are told: whether the mesh serves, the figures of its ranks, and that its queue is full. Pure; owned by core.py.

A frontend whose /metrics is read wants figures as of now. Each rank is asked for a Load, by the way of the requests and their aborts,
so its answer knows of all that went before. A frontend has one such question at a time: a newer one takes the place of the older.
"""

from collections.abc import Mapping

from msgspec import Struct

from meshlm.coordinator.held import Held
from meshlm.coordinator.queue_gate import QueueGate
from meshlm.coordinator.routing import Router
from meshlm.coordinator.weights import Weights
from meshlm.protocol.adapters import AdapterList
from meshlm.protocol.counts import CountsOf, ProcessCounts
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import ReportLoad
from meshlm.protocol.sleeping import Sleeping
from meshlm.protocol.wire.ids import Identity, RequestId, Role
from meshlm.runtime.process.events import Send


class Frontends:
    """`members`, `router`, `held`, `sleeping` and `weights` are the core's; they are only read. `serving` is what frontends know."""

    def __init__(
        self,
        members: Mapping[Identity, control.Member],
        router: Router,
        held: Mapping[RequestId, Held],
        sleeping: Mapping[Identity, Sleeping],
        weights: Weights,
        first_rank: int,
    ) -> None:
        self._members, self._router, self._held, self._first_rank = members, router, held, first_rank
        self._sleeping, self._weights = sleeping, weights
        self._last_question = 0
        self._questions: dict[Identity, tuple[int, set[Identity]]] = {}  # by frontend: its number, silent ranks
        self.gate = QueueGate()
        self.serving = False
        self.adapters = AdapterList()
        self.paused = False  # the mesh, as an operator wants it
        self._blocked: dict[Identity, str] = {}  # whose link does not move
        self._counts: dict[Identity, ProcessCounts] = {}  # of processes that are no schedulers, as they said last

    def tick(self) -> list[Send]:
        """Everything anew, for a frontend that a message did not reach."""
        return [*self._stats(), *(self._tell(control.QueueFull(True)) if self.gate.shut else ())]

    def joined(self, member: Identity) -> list[Send]:
        """A process is a member now. A frontend gets the figures at once: it can serve, and need not wait a second."""
        told = self.serving_change()
        if member.role is Role.FRONTEND and not told:
            told = [Send(member, self._figures())]
        return [
            *told,
            *([Send(member, self.adapters)] if member.role is Role.FRONTEND and self.adapters.version else ()),
        ]

    def lost(self, identity: Identity) -> list[Send]:
        """A rank or a frontend is gone, so that nobody waits for it."""
        self._counts.pop(identity, None)
        self._questions.pop(identity, None)
        for _, silent in self._questions.values():
            silent.discard(identity)
        return self._answer()

    def blocked(self, process: Identity, reason: str) -> list[Send]:
        """A process says that a link of it does not move, or with "" that all do."""
        if self._blocked.get(process, "") == reason:
            return []
        self._blocked[process] = reason
        if not reason:
            del self._blocked[process]
        return self._stats()

    def has_adapters(self, frontend: Identity, adapters: AdapterList) -> list[Send]:
        """A frontend's list, newer than ours, is everybody's; another one is told which that is."""
        if adapters.version <= self.adapters.version:
            return [Send(frontend, self.adapters)]
        self.adapters = adapters
        return self._tell(adapters)

    # --- figures ---

    def counted(self, process: Identity, counts: ProcessCounts) -> None:
        if process in self._members:
            self._counts[process] = counts

    def serving_change(self) -> list[Send]:
        """The figures, where the mesh begins or ceases to serve."""
        serving = self._reason() == ""
        if serving == self.serving:
            return []
        self.serving = serving
        return self._stats()

    @property
    def asleep(self) -> bool:
        return any(one.tags for one in self._sleeping.values())

    def _reason(self) -> str:
        """Says what is missing before requests can be served; "" when nothing is."""
        if self.asleep:
            return "the workers sleep (POST /wake_up)"
        ranks = self._router.ranks.values()
        if not any(rank.serving for rank in ranks):
            behind = next((rank.load.behind for rank in ranks if rank.load is not None and rank.load.behind), "")
            return f"other weights than the mesh is to have: {behind}" if behind else "no scheduler with ready workers"
        if not any(m.ready for m in self._members.values() if m.identity.role is Role.DETOKENIZER):
            return "no detokenizer"
        return ""

    def ask(self, frontend: Identity) -> list[Send]:
        """It wants figures as of now. The ranks that have sent a Load are asked first; one that is starting has no requests."""
        ranks = [rank.identity for rank in self._router.ranks.values() if rank.load is not None]
        self._last_question += 1
        self._questions[frontend] = (self._last_question, set(ranks))
        return self._answer() + [Send(rank, ReportLoad(self._last_question)) for rank in ranks]

    def answered(self, rank: Identity, number: int) -> list[Send]:
        """A rank's Load came; `number` is the newest question that it knows."""
        for asked, silent in self._questions.values():
            if asked <= number:
                silent.discard(rank)
        return self._answer() if self._questions else []

    def _answer(self) -> list[Send]:
        """The figures, for those who have waited for all ranks."""
        over = [frontend for frontend, (_, silent) in self._questions.items() if not silent]
        for frontend in over:
            del self._questions[frontend]
        return [Send(frontend, self._figures(asked=True)) for frontend in over]

    def _stats(self) -> list[Send]:
        return self._tell(self._figures())

    def _figures(self, *, asked: bool = False) -> control.MeshStats:
        ranks = tuple(rank.stats(self._first_rank) for rank in self._router.ranks.values() if rank.load is not None)
        reason = self._reason()
        blocked = next(iter(self._blocked.values()), "")
        counts = tuple(CountsOf(process, one) for process, one in self._counts.items())
        now, doing = self._weights.current, self._weights.updating
        figures = reason == "", reason, ranks, len(self._held), asked, blocked, self.paused, counts
        return control.MeshStats(*figures, weights=now, updating=doing)

    # --- the queue ---

    def queue_full(self, now: float) -> list[Send]:
        """A request was refused since the queue is full."""
        return self._tell(control.QueueFull(True)) if self.gate.refused(now) else []

    def queue_open(self) -> list[Send]:
        self.gate.open()
        return self._tell(control.QueueFull(False))

    def _tell(self, message: Struct) -> list[Send]:
        return [Send(identity, message) for identity in self._members if identity.role is Role.FRONTEND]
