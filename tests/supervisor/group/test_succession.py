"""Whenever a supervisor dies, the one that follows knows the group from what was written last."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import Died
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor.group import events, rolling, succession
from meshlm.supervisor.group.core import UNSEEN_END, Group, State, exit_text
from meshlm.supervisor.group.rolling import SPARE_INDEX, Rolling
from meshlm.supervisor.group.succession import MeshState, Place, ScalingState

FRONTEND, OTHER = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1)
WORKER, COORDINATOR = Identity(Role.WORKER), Identity(Role.COORDINATOR)
MEMBERS = (COORDINATOR, WORKER, FRONTEND)
ADDED = Identity(Role.WORKER, 1)


class World:
    """A group that is ready, its processes as the system has them, and the state that was written last."""

    def __init__(self) -> None:
        self.rolling, self.now = Rolling(Group(MEMBERS, 100, 60.0)), 1000.0
        self.alive: dict[Identity, Incarnation] = {}
        self.given_out: list[Incarnation] = []
        self.ended = False
        self.tell(events.Start())
        for identity in MEMBERS:
            self.ready(identity)
        self.write()

    def write(self) -> None:
        places = succession.places_of(self.rolling)
        self.places = tuple(
            msgspec.structs.replace(place, pid=7 if self.alive.get(place.identity) == place.incarnation else 0)
            for place in places
        )
        self.last = self.rolling.group.last_incarnation

    def tell(self, event: rolling.Event) -> None:
        self.now += 0.05
        for effect in self.rolling.roll(event, self.now):
            match effect:
                case events.Spawn():
                    assert effect.incarnation > max(self.given_out, default=0), "incarnations grow over supervisors"
                    self.given_out.append(effect.incarnation)
                    self.alive[effect.identity] = effect.incarnation
                case events.Kill():
                    self.exit(effect.identity)
                case events.AllStopped() | events.GiveUp():
                    self.ended = True
        self.rolling.check()

    def ready(self, identity: Identity) -> None:
        if identity in self.alive:
            self.tell(events.BecameReady(identity, self.alive[identity]))

    def exit(self, identity: Identity, code: int = -9) -> None:
        if (incarnation := self.alive.pop(identity, None)) is not None:
            self.tell(events.Exited(identity, incarnation, code))

    def supervisor_dies(self, died: set[Identity], *, before_it_wrote: bool) -> None:
        """And with it whoever has not been written down, as the kernel sees to; and by chance `died`."""
        if not before_it_wrote:
            self.write()
        known = {place.identity: place.incarnation for place in self.places if place.pid}
        self.alive = {who: one for who, one in self.alive.items() if known.get(who) == one and who not in died}
        places = msgspec.json.decode(msgspec.json.encode(self.places), type=tuple[Place, ...])
        self.rolling = Rolling(Group((), 100, 60.0))
        self.now -= 0.0 if before_it_wrote else 3.0  # somebody has set the clock
        settled = succession.settled(places, self.now)
        succession.rebuild(self.rolling, settled, self.last, self.now)
        self.rolling.check()
        known = {who: process.incarnation for who, process in self.rolling.group.processes.items()}
        assert all(known[who] == one for who, one in self.alive.items()), "nobody who outlives it is forgotten"
        for place in settled:
            if place.pid and self.alive.get(place.identity) != place.incarnation:
                self.tell(events.Exited(place.identity, place.incarnation, UNSEEN_END))
        self.write()
        for identity in list(self.alive):
            self.ready(identity)


EVENTS = st.sampled_from(
    [
        "exit worker",
        "exit frontend",
        "exit coordinator",
        "restart",
        "prepared",
        "add",
        "retire",
        "ready",
        "tick",
        "wait",
    ]
)


def do(world: World, what: str) -> None:
    there = world.rolling.group.processes
    match what.split():
        case ["exit", role]:
            world.exit(Identity(Role(role)))
        case ["restart"] if not world.rolling.restarting and not world.rolling.group.changing:
            world.tell(rolling.Restart((WORKER, FRONTEND)))
        case ["prepared"]:
            world.tell(rolling.Prepared(WORKER))
        case ["add"] if ADDED not in there and not world.rolling.restarting:
            world.tell(events.Add((ADDED,)))
        case ["retire"] if ADDED in there and not world.rolling.group.changing and not world.rolling.restarting:
            world.tell(events.Retire((ADDED,), world.now))
        case ["ready"]:
            for identity in list(world.alive):
                world.ready(identity)
        case ["tick" | "wait" as word]:
            world.now += 12.0 if word == "wait" else 0.0
            world.tell(events.Tick())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(EVENTS, st.booleans()), max_size=25),
    st.lists(st.tuples(st.integers(0, 24), st.sets(st.sampled_from(MEMBERS)), st.booleans()), max_size=3),
)
def test_a_mesh_survives_its_supervisors(steps: list[tuple[str, bool]], deaths: list[tuple[int, Any, bool]]) -> None:
    """Each place that should have a process has one in the end, and it is the one that nobody killed where there is one."""
    world = World()
    for number, (what, writes) in enumerate(steps):
        do(world, what)
        if writes:
            world.write()
        for at, died, hastily in deaths:
            if at == number and not world.ended:
                world.supervisor_dies(died, before_it_wrote=hastily)
    assert not world.ended
    for _ in range(40):
        world.tell(events.Tick())
        world.now += 1.0
        for identity, process in list(world.rolling.group.processes.items()):
            if process.state is State.STOPPING:
                world.exit(identity, 0)
            world.ready(identity)
        world.tell(rolling.Prepared(WORKER))
    processes = world.rolling.group.processes
    assert set(MEMBERS) <= set(processes)
    assert all(processes[one].state is State.READY for one in MEMBERS)
    assert {one: processes[one].incarnation for one in MEMBERS} == {one: world.alive[one] for one in MEMBERS}
    assert not any(one.index >= SPARE_INDEX for one in processes), "the spare of a restart that nobody ends has left"


def test_who_lives_keeps_its_incarnation_and_its_counts() -> None:
    world = World()
    world.exit(WORKER)
    world.ready(WORKER)
    before = dict(world.alive)
    world.supervisor_dies({COORDINATOR}, before_it_wrote=False)
    processes = world.rolling.group.processes
    assert processes[WORKER].restarts == 1
    assert processes[WORKER].state is processes[FRONTEND].state is State.READY
    assert (processes[WORKER].incarnation, processes[FRONTEND].incarnation) == (before[WORKER], before[FRONTEND])
    assert processes[COORDINATOR].incarnation > before[COORDINATOR], "its death was in the gap"
    assert processes[COORDINATOR].restarts == 1


def test_a_change_that_is_under_way_goes_on() -> None:
    world = World()
    world.tell(events.Add((ADDED,)))
    world.supervisor_dies(set(), before_it_wrote=False)
    assert world.rolling.group.processes[ADDED].state is State.READY
    assert not world.rolling.group.changing, "the new ones said that they are ready, to the supervisor that followed"
    world.tell(events.Retire((ADDED,), world.now + 5))
    world.supervisor_dies(set(), before_it_wrote=False)
    world.now += 6
    world.tell(events.Tick())
    world.exit(ADDED, 0)
    assert ADDED not in world.rolling.group.processes


def test_the_state_comes_back_as_it_was_written() -> None:
    config = MeshConfig()
    state = MeshState(
        digest="d",
        version="1",
        supervisor=Incarnation(5),
        asked=config,
        config=config,
        keys="salt:hash",
        places=(
            Place(identity=WORKER, incarnation=Incarnation(3), pid=9, start_ticks=8, deaths=(1.5,), leaves_at=2.0),
        ),
        died=(Died(WORKER, Incarnation(2), ("cmpl-1",)),),
        stops_at=7.0,
        scaling=ScalingState(doing="adding rank 1", before=config, with_all=config),
    )
    assert msgspec.json.decode(msgspec.json.encode(state), type=MeshState) == state
    assert "not known" in exit_text(UNSEEN_END)
