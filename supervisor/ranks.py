"""Has another number of ranks in a mesh that runs: begins the change that scaling.py makes of an order, and undoes one that failed.

Owned by io.py.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from meshlm.protocol import control_edge as edge
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity, Role
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.group import events, rolling
from meshlm.supervisor.group.scaling import Scaling
from meshlm.supervisor.settings.layout import identities


class Host(Protocol):
    """The part of the supervisor that is used."""

    config: MeshConfig
    ready: asyncio.Event

    @property
    def line(self) -> Callable[[str], None]: ...
    def send(self, peer: Identity, message: Struct) -> bool: ...


class Ranks:
    """`do` gives an event to the group, whose clock is `clock`."""

    def __init__(
        self, host: Host, group: rolling.Rolling, do: Callable[[rolling.Event], None], clock: Callable[[], float]
    ) -> None:
        self.scaling = Scaling(identities)
        self._host, self._group, self._do, self._clock = host, group, do, clock

    def scale(self, num_ranks: object, drain_s: object) -> str:
        """Begin to have another number of ranks; what is wrong with that, "" when nothing is."""
        if not self._host.ready.is_set() or self._group.stopping:
            return "the mesh is not ready yet" if not self._group.stopping else "the mesh is stopping"
        if self._group.changing:
            return f"the mesh is being scaled already: {self.scaling.doing}"
        if self._group.restarting:
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

    def drained(self, dp_rank: int) -> None:
        """The coordinator says that this rank has nothing to do any more."""
        self._do(events.Drained(self.scaling.of_rank(dp_rank)))

    def tell(self) -> None:
        """The coordinator is to know how many there are."""
        self._host.send(Identity(Role.COORDINATOR), edge.SetRanks(self._host.config.parallel.data_parallel_size))
