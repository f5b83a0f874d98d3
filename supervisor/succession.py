"""Makes a mesh outlive its supervisor: keeps the state file and the standby, tells processes whom to watch, and takes over what a
supervisor before this one left.

Owned by io.py. A mesh in a user's program, or of several nodes, ends with its supervisor: there it does nothing. What is written
before what: group/succession.py.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from meshlm import __version__
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges import control as edge
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor.group import succession as core
from meshlm.supervisor.group.operations import Operations
from meshlm.supervisor.group.rolling import Rolling
from meshlm.supervisor.group.scaling import Scaling
from meshlm.supervisor.group.succession import MeshState, Place
from meshlm.supervisor.processes import proc_stat, state_file
from meshlm.supervisor.processes.incarnations import Incarnations, KnownDeaths
from meshlm.supervisor.processes.spare import Spare, Spares


class Host(Protocol):
    """The part of the supervisor that is used."""

    config: MeshConfig

    def send(self, peer: Identity, message: Struct) -> bool: ...
    def linked(self, role: Role) -> list[Identity]: ...


@dataclass(frozen=True)
class Kept:
    """What the next supervisor is told of."""

    rolling: Rolling
    incarnations: Incarnations
    deaths: KnownDeaths
    operations: Operations
    scaling: Scaling
    clock: Callable[[], float]  # the group's


class Succession:
    """`asked` is the configuration as the flags have it; None: the mesh ends with its supervisor. `left` is what the supervisor before
    this one left."""

    def __init__(self, asked: MeshConfig | None, left: MeshState | None = None) -> None:
        self._asked, self.left = asked, left
        self.incarnation = Incarnation(max(time.time_ns(), left.supervisor + 1 if left is not None else 0))
        self._keys = left.keys if left is not None else ""
        self._stops_at: float | None = None
        self._ticks: dict[int, int] = {}  # of processes, by pid
        self._begun = False  # processes may outlive this one

    def of(self, host: Host, kept: Kept) -> None:
        """The supervisor whose succession it is, before all else."""
        self._host, self._kept = host, kept
        self._spares = Spares(lambda: self._host.config)

    def take_over(self) -> None:
        """Have the group as it was left. Processes that have ended meanwhile die now."""
        left, kept = self.left, self._kept
        assert left is not None
        places = core.settled(left.places, kept.clock())
        core.rebuild(kept.rolling, places, left.last_incarnation, kept.clock())
        for died in left.died:
            kept.deaths.learn(died)
        kept.operations.refusing = left.refusing
        if left.scaling is not None:
            kept.scaling.go_on(left.scaling.doing, left.scaling.before, left.scaling.with_all)
        for place in places:
            if place.pid:
                kept.incarnations.adopt(place)
        self.begin()

    def begin(self) -> None:
        """All were ready: from now on they may outlive this supervisor."""
        if self._asked is None:
            return
        self._begun = True
        self.keep()
        for peer in (one for role in Role if role is not Role.SUPERVISOR for one in self._host.linked(role)):
            self.tell(peer)

    def tell(self, peer: Identity) -> None:
        """Whom to watch. This comes after the state file has the peer: io.py writes it with the spawn."""
        if self._begun:
            self._host.send(peer, edge.Supervised(os.getpid(), self._host.config.run.orphan_grace))

    def keep(self) -> None:
        """Write down how things are."""
        if self._begun:
            assert self._asked is not None
            state_file.write(Path(self._host.config.run.run_dir), self._state(self._asked))

    def _state(self, asked: MeshConfig) -> MeshState:
        kept, config = self._kept, self._host.config
        self._keys = self._keys or state_file.digest_of_keys(config)
        scaling = kept.scaling.under_way()
        return MeshState(
            digest=schema_digest(),
            version=__version__,
            supervisor=self.incarnation,
            asked=state_file.without_keys(asked),
            config=state_file.without_keys(config),
            keys=self._keys,
            places=tuple(map(self._with_pid, core.places_of(kept.rolling))),
            last_incarnation=kept.rolling.group.last_incarnation,
            died=kept.deaths.for_newcomers(),
            refusing=kept.operations.refusing,
            stops_at=self._stops_at,
            scaling=None
            if scaling is None
            else core.ScalingState(
                doing=scaling[0],
                before=state_file.without_keys(scaling[1]),
                with_all=state_file.without_keys(scaling[2]),
            ),
        )

    def _with_pid(self, place: Place) -> Place:
        child = self._kept.incarnations.of(place.identity)
        if child is None or child.incarnation != place.incarnation:
            return place
        if child.pid not in self._ticks:
            stat = proc_stat.of(child.pid)
            self._ticks[child.pid] = stat.start_ticks if stat is not None else 0
        return replace(place, pid=child.pid, start_ticks=self._ticks[child.pid])

    def stops(self, drain_s: float) -> None:
        """The mesh ends, whoever is its supervisor."""
        self._stops_at = time.time() + drain_s
        self.keep()

    def tick(self, now: float) -> None:
        """Keep a standby, if there is to be one. `now` is of the loop."""
        group = self._kept.rolling.group
        if self._begun and not group.gave_up and Role.SUPERVISOR.value in self._host.config.run.standby_roles:
            self._spares.keep(now)

    def standbys(self) -> list[Spare]:
        return self._spares.there()

    def renew(self) -> None:
        self._spares.renew()

    def end(self) -> None:
        """Nobody is left, and nobody is to follow."""
        if self._begun:
            state_file.remove(Path(self._host.config.run.run_dir))
        self._begun = False
        self._spares.end()
