"""Has another number of ranks in a mesh that runs: begins the change that scaling.py makes of an order, and undoes one that failed.

The orders come from `meshlm scale` and, through a frontend, from POST /scale_elastic_ep. Owned by io.py.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges import control as edge
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Role
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.group import events, rolling
from meshlm.supervisor.group.scaling import Scaling
from meshlm.supervisor.settings.placement import identities


class Host(Protocol):
    """The part of the supervisor that is used."""

    config: MeshConfig
    ready: asyncio.Event

    @property
    def line(self) -> Callable[[str], None]: ...
    def send(self, peer: Identity, message: Struct) -> bool: ...
    def linked(self, role: Role) -> list[Identity]: ...


class Ranks:
    """`do` gives an event to the group, whose clock is `clock`."""

    def __init__(
        self, host: Host, restarts: rolling.Rolling, do: Callable[[rolling.Event], None], clock: Callable[[], float]
    ) -> None:
        self.scaling = Scaling(identities)
        self._host, self._restarts, self._do, self._clock = host, restarts, do, clock
        self._group = restarts.group
        self._waiting: list[tuple[Identity, str]] = []  # frontends that hear of the change's end, and their questions

    def asked(self, peer: Identity, message: Struct) -> bool:
        """A frontend's operator wants another number, or to know it. False: the message is no such question."""
        if not isinstance(message, edge.ScaleRanks):
            return False
        refused = ""
        if message.num_ranks is not None:
            drain_s = self._host.config.run.drain_timeout if message.drain_s is None else message.drain_s
            refused = self.scale(message.num_ranks, drain_s)
            if not refused and self.scaling.doing:
                self._waiting.append((peer, message.id))
                return True
        self._answer(peer, message.id, refused=refused)
        return True

    def _answer(self, frontend: Identity, question: str, *, refused: str = "", failed: str = "") -> None:
        num_ranks = self._host.config.parallel.data_parallel_size
        self._host.send(frontend, edge.RanksScaled(question, num_ranks, self.scaling.doing, refused, failed))

    def scale(self, num_ranks: object, drain_s: object) -> str:
        """Begin to have another number of ranks; what is wrong with that, "" when nothing is."""
        if not self._host.ready.is_set() or self._group.stopping:
            return "the mesh is not ready yet" if not self._group.stopping else "the mesh is stopping"
        if self._group.changing:
            return f"the mesh is being scaled already: {self.scaling.doing}"
        if self._restarts.restarting:
            return "a restart is under way"
        try:
            change = self.scaling.begin(self._host.config, num_ranks, drain_s)
            if change is None:
                return ""
        except UsageError as error:
            self.scaling.end("")
            return str(error)
        self._host.line(self.scaling.doing)
        self._host.config = change.config  # for processes that start from now on
        self.tell()
        until = self._clock() + change.drain_s
        self._do(events.Add(change.added) if change.added else events.Retire(change.removed, until))
        return ""

    def changed(self, failure: str) -> None:
        """The end of a change. What failed is undone."""
        before = self.scaling.end(failure)
        if failure and before is not None:
            self._host.config = before
            self.tell()
        num_ranks = self._host.config.parallel.data_parallel_size
        self._host.line(f"scaling failed: {failure}" if failure else f"ranks: {num_ranks}")
        for frontend in self._host.linked(Role.FRONTEND):
            self._host.send(frontend, edge.SetRanks(num_ranks))
        waiting, self._waiting = self._waiting, []
        for frontend, question in waiting:
            self._answer(frontend, question, failed=failure)

    def drained(self, dp_rank: int) -> None:
        """The coordinator says that this rank has nothing to do any more."""
        self._do(events.Drained(self.scaling.of_rank(dp_rank)))

    def tell(self) -> None:
        """The coordinator is to know how many there are."""
        self._host.send(COORDINATOR, edge.SetRanks(self._host.config.parallel.data_parallel_size))
