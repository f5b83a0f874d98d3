"""What a supervisor leaves to the one that follows it, and how that one knows the group from it. Pure.

`MeshState` is what is in the state file of the run directory (processes/state_file.py): written after each event of the group that
may have changed it, and before any process is told to outlive its supervisor. So whoever outlives it is in the file, and whoever is
not dies with it. The file may be late by one event: a process in it may have ended, which its pid tells, and one that follows it may
have been begun, which has ended then too. What cannot be late is the last incarnation: the next is larger by the clock as well.

What is known again from elsewhere is not in it: who is ready says so in its first words to the new supervisor, steps and phases come
with the next beat, and the version of the weights is the coordinator's.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import Died
from meshlm.protocol.wire.ids import Identity, Incarnation
from meshlm.supervisor.group.core import Process, State
from meshlm.supervisor.group.rolling import SPARE_INDEX, Rolling

SPARE_STAYS_S = 10.0  # a frontend that stood in for one that was being replaced, until that one is back


class Place(Struct, frozen=True, kw_only=True):
    """One place of the group, with the process that has it. `pid` is 0 without one."""

    identity: Identity
    incarnation: Incarnation
    pid: int = 0
    start_ticks: int = 0  # with the pid it is this process's alone (processes/proc_stat.py)
    started_at: float = 0.0
    restarts: int = 0
    early_deaths: int = 0
    deaths: tuple[float, ...] = ()
    has_been_ready: bool = True
    on_trial: bool = False
    leaves_at: float | None = None


class ScalingState(Struct, frozen=True, kw_only=True):
    """A change of the number of ranks that is under way (scaling.py)."""

    doing: str
    before: MeshConfig
    with_all: MeshConfig


class MeshState(Struct, frozen=True, kw_only=True):
    """All that the next supervisor has to know. Configurations are without keys, which `keys` can be held against."""

    digest: str  # of the protocol that the processes speak
    version: str
    supervisor: Incarnation
    asked: MeshConfig  # what the flags said
    config: MeshConfig  # as it is now
    keys: str
    places: tuple[Place, ...]
    last_incarnation: int = 0
    died: tuple[Died, ...] = ()
    refusing: bool = False
    stops_at: float | None = None  # the wall clock: it was being ended, and has so long for the requests that run
    scaling: ScalingState | None = None


def places_of(rolling: Rolling) -> tuple[Place, ...]:
    """The group's places, without pids. A process that stopped for good has none."""
    found = (process for process in rolling.group.processes.values() if process.state is not State.STOPPED)
    return tuple(_place(process) for process in found)


def _place(process: Process) -> Place:
    return Place(
        identity=process.identity,
        incarnation=process.incarnation,
        started_at=process.started_at,
        restarts=process.restarts,
        early_deaths=process.early_deaths,
        deaths=tuple(process.deaths),
        has_been_ready=process.has_been_ready,
        on_trial=process.on_trial,
        leaves_at=process.leaves_at,
    )


def settled(places: Iterable[Place], now: float) -> tuple[Place, ...]:
    """What the next supervisor begins with: one that leaves and has no process is gone, and a spare of a restart leaves soon, since
    the restart ended with the supervisor that did it."""
    found = (place for place in places if place.pid or place.leaves_at is None)
    return tuple(
        replace(place, leaves_at=now + SPARE_STAYS_S, on_trial=False)
        if place.identity.index >= SPARE_INDEX and place.leaves_at is None
        else place
        for place in found
    )


def rebuild(rolling: Rolling, places: Iterable[Place], last_incarnation: int, now: float) -> None:
    """The group as it was left. `places` are settled ones; Exited follows for a process that has ended meanwhile."""
    group = rolling.group
    group.processes.clear()
    for place in places:
        group.adopt(_process(place, now), now)
    group.skip_incarnations(last_incarnation)


def _process(place: Place, now: float) -> Process:
    started_at = min(place.started_at, now)  # a clock may have been set back meanwhile
    return Process(
        place.identity,
        state=State.STARTING if place.pid else State.BACKOFF,
        incarnation=place.incarnation,
        started_at=started_at,
        beaten_at=now,
        moved_at=now,
        restarts=place.restarts,
        early_deaths=place.early_deaths,
        restart_at=now,
        deaths=[at for at in place.deaths if at <= now],
        has_been_ready=place.has_been_ready,
        on_trial=place.on_trial,
        leaves_at=place.leaves_at,
    )
