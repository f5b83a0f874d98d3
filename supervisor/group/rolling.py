"""The rolling restart's pure core: processes are replaced one after the other while the mesh serves.

It owns the group (core.py), which handles all events but the ends of processes that are being replaced. A frontend hands over: it
takes no new connections and finishes what it has, while the others serve; the only one gets a spare beside it first, which leaves
when the new one is there. Any other process gets a standby, loaded as far as possible without a part in the mesh; then the old
one is asked to end and the standby takes over at once. The next one's turn comes when the new one is ready. The workers of one
rank compute each step together, and none goes on without the others: they are replaced as one.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.group import events
from meshlm.supervisor.group.core import Group, Process, State, exit_text

SPARE_INDEX = 1000
SETTLE_S = 0.5  # between two replacements: links are opened and requests move

ORDER = (Role.COORDINATOR, Role.STORE, Role.MEDIA, Role.DETOKENIZER, Role.SCHEDULER, Role.WORKER, Role.FRONTEND)


class Restart(Struct, frozen=True, tag="restart"):
    """Replace these, in this order."""

    identities: tuple[Identity, ...]


class Prepared(Struct, frozen=True, tag="prepared"):
    """The standby of this process is loaded; or it ended, and `failure` says how."""

    identity: Identity
    failure: str = ""


class Prepare(Struct, frozen=True, tag="prepare"):
    """Load a standby. Spawn of the same identity gives it the place."""

    identity: Identity


class AskToLeave(Struct, frozen=True, tag="ask_to_leave"):
    """Its successor is there: finish what runs, end."""

    identity: Identity


class Say(Struct, frozen=True, tag="say"):
    text: str


class Outcome(Struct, frozen=True, tag="outcome"):
    """The restart is over. `failure` is "" when all were replaced and are ready."""

    failure: str = ""


Event = events.Event | Restart | Prepared
Effect = events.Effect | Prepare | AskToLeave | Say | Outcome


class Stage(Enum):
    """PREPARING -> LEAVING -> STARTING [-> SPARE_LEAVES] -> SETTLING."""

    PREPARING = "preparing"  # the standby or the spare
    LEAVING = "leaving"
    STARTING = "starting"
    SPARE_LEAVES = "spare leaves"
    SETTLING = "settling"


@dataclass(slots=True)
class Step:
    """The replacement of one process, or of the workers of one rank."""

    members: tuple[Identity, ...]
    stage: Stage
    began_at: float
    since: float  # of this stage
    spare: Identity | None = None
    prepared: set[Identity] = field(default_factory=set)
    failed: bool = False  # the restart is over, and only the spare has to leave

    def __str__(self) -> str:
        return ", ".join(map(str, self.members))


class Rolling:
    """Restarts of a group's processes. A process that is asked to leave and does not is killed by io.py."""

    def __init__(self, group: Group, workers_per_rank: int = 1) -> None:
        self.group = group
        self._workers_per_rank = workers_per_rank
        self._queue: deque[Identity] = deque()
        self._step: Step | None = None

    @classmethod
    def of_mesh(cls, members: list[Identity], config: MeshConfig) -> "Rolling":
        """The group of these processes with the limits of the configuration; one host ends the steps of all."""
        run, is_head = config.run, config.node is None or not config.node.head
        limits = (run.max_restarts, run.startup_timeout, run.stall_timeout, run.step_timeout)
        return cls(Group(members, *limits, ends_steps=is_head), config.parallel.workers_per_rank)

    def roll(self, event: Event, now: float) -> list[Effect]:
        """The effects of an event of the group's, or of a restart's."""
        effects: list[Effect] = []
        match event:
            case Restart():
                self._queue.extend(event.identities)
            case Prepared():
                effects += self._prepared(event, now)
            case events.Exited() if (process := self._asked_to_leave(event)) is not None:
                effects += self._left(process, event, now)
            case _:
                effects += self.group.handle(event, now)
        if self.group.stopping or self.group.gave_up:
            self._queue.clear()
            self._step = None
            return effects
        return effects + self._go_on(now)

    @property
    def restarting(self) -> bool:
        return self._step is not None or bool(self._queue)

    def to_keep_warm(self, roles: Collection[str]) -> list[Role]:
        """Those of --standby-roles that should have a standby, for as long as all is as it should be."""
        group = self.group
        if not group.was_ready or group.stopping or group.gave_up or group.changing or self.restarting:
            return []
        present = {identity.role for identity in group.processes}
        return [role for role in present if role.value in roles]

    def _prepared(self, event: Prepared, now: float) -> list[Effect]:
        step = self._step
        if step is None or event.identity not in step.members or step.stage is not Stage.PREPARING:
            return []
        if event.failure:
            return self._fail(f"{event.identity} was not replaced: its successor did not load: {event.failure}", now)
        step.prepared.add(event.identity)
        return []

    def _fail(self, text: str, now: float) -> list[Effect]:
        """The restart ends here; a spare leaves again."""
        self._queue.clear()
        step, self._step = self._step, None
        if step is None or step.spare is None:
            return [Outcome(text)]
        self._step, step.failed = step, True
        return [Outcome(text), *self._dismiss(step, step.spare, now)]

    def _dismiss(self, step: Step, spare: Identity, now: float) -> list[Effect]:
        step.stage, step.since = Stage.SPARE_LEAVES, now
        self.group.processes[spare].state = State.STOPPING
        return [Say(f"{spare}: finishing its connections"), AskToLeave(spare)]

    def _asked_to_leave(self, event: events.Exited) -> Process | None:
        """The process that has ended, where it was asked to leave or is a spare: it did not die."""
        step, process = self._step, self.group.processes.get(event.identity)
        if step is None or process is None or process.incarnation != event.incarnation:
            return None
        if self.group.stopping or self.group.gave_up:
            return None
        leaves = event.identity in step.members and process.state is State.STOPPING
        return process if leaves or event.identity == step.spare else None

    def _left(self, process: Process, event: events.Exited, now: float) -> list[Effect]:
        step = self._step
        assert step is not None
        died: list[Effect] = [events.TellDied(process.identity, process.incarnation)]
        if process.identity != step.spare:
            process.restarts += 1
            return [*died, self.group.spawn(process, now)]
        del self.group.processes[step.spare]
        step.spare = None
        if step.stage is not Stage.PREPARING:
            return died
        words = process.last_words or exit_text(event.code)
        return [*died, *self._fail(f"{step} was not replaced: the spare {process.identity} ended: {words}", now)]

    # --- one step after the other ---

    def _go_on(self, now: float) -> list[Effect]:
        step = self._step
        if step is None:
            return self._begin(self._queue.popleft(), now) if self._queue else []
        effects = self._advance(step, now)
        if step.stage in (Stage.PREPARING, Stage.STARTING) and now - step.since > self.group.start_deadline_s:
            text = f"{step}: still {step.stage.value} after {self.group.start_deadline_s:.0f} s (--startup-timeout)"
            effects += self._fail(text, now)
        return effects

    def _advance(self, step: Step, now: float) -> list[Effect]:
        states = {self.group.processes[identity].state for identity in step.members}
        match step.stage:
            case Stage.PREPARING:
                if states & {State.BACKOFF, State.STARTING}:
                    step.stage, step.since = Stage.STARTING, now  # it died meanwhile, and has a new incarnation already
                elif self._successor_is_there(step):
                    return self._let_leave(step, now)
            case Stage.LEAVING if State.STOPPING not in states:
                step.stage, step.since = Stage.STARTING, now
            case Stage.STARTING if states == {State.READY}:
                return self._end(step, now)
            case Stage.SPARE_LEAVES if step.spare is None:
                step.stage, step.since = Stage.SETTLING, now
            case Stage.SETTLING if now - step.since >= SETTLE_S:
                self._step = None
                return self._go_on(now) if self._queue else [] if step.failed else [Outcome()]
        return []

    def _successor_is_there(self, step: Step) -> bool:
        if step.spare is not None:
            return self.group.processes[step.spare].state is State.READY
        return step.prepared.issuperset(step.members)

    def _begin(self, identity: Identity, now: float) -> list[Effect]:
        self._step = step = Step(self._with_mates(identity), Stage.PREPARING, now, now)
        self._queue = deque(other for other in self._queue if other not in step.members)
        for process in (self.group.processes[member] for member in step.members):
            if process.state is not State.READY:
                step.stage, step.since = Stage.STARTING, now
                return [Say(f"{process.identity}: is {process.state.value} already")]
        if identity.role is not Role.FRONTEND:
            whose = "its successor" if len(step.members) == 1 else "their successors"
            return [Say(f"{step}: loading {whose}"), *(Prepare(member) for member in step.members)]
        ready = (p.identity for p in self.group.processes.values() if p.state is State.READY)
        if any(one.role is Role.FRONTEND and one != identity for one in ready):
            return self._let_leave(step, now)
        step.spare = Identity(Role.FRONTEND, SPARE_INDEX + identity.index)
        self.group.processes[step.spare] = spare = Process(step.spare)
        return [Say(f"{identity}: starting {step.spare} to serve meanwhile"), self.group.spawn(spare, now)]

    def _with_mates(self, identity: Identity) -> tuple[Identity, ...]:
        """It, and for a worker the others of its rank that are here."""
        if identity.role is not Role.WORKER or self._workers_per_rank == 1:
            return (identity,)
        rank = identity.index // self._workers_per_rank
        workers = sorted(other for other in self.group.processes if other.role is Role.WORKER)
        return tuple(other for other in workers if other.index // self._workers_per_rank == rank)

    def _let_leave(self, step: Step, now: float) -> list[Effect]:
        step.stage, step.since = Stage.LEAVING, now
        for member in step.members:
            self.group.processes[member].state = State.STOPPING
        what = "finishing its connections" if step.members[0].role is Role.FRONTEND else "ending"
        return [Say(f"{step}: {what}"), *(AskToLeave(member) for member in step.members)]

    def _end(self, step: Step, now: float) -> list[Effect]:
        said: list[Effect] = [Say(f"{step}: replaced, ready after {now - step.began_at:.1f} s")]
        if step.spare is None:
            step.stage, step.since = Stage.SETTLING, now
            return said
        return [*said, *self._dismiss(step, step.spare, now)]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.group.check()
        there = self.group.processes.values()
        spares = [one.identity for one in there if one.identity.index >= SPARE_INDEX and one.leaves_at is None]
        step = self._step
        if not self.group.stopping and not self.group.gave_up:
            stopping = (p for p in self.group.processes.values() if p.state is State.STOPPING)
            leaving = [process.identity for process in stopping if process.leaves_at is None]
            allowed: list[Identity | None] = [] if step is None else [*step.members, step.spare]
            assert all(identity in allowed for identity in leaving), "it leaves, and nobody replaces it"
            assert all(identity in allowed for identity in spares), "a spare that nobody needs"


def chosen(what: str, processes: Iterable[Identity]) -> tuple[Identity, ...]:
    """'all', a role or ROLE/INDEX -> what to replace, in order. ValueError names what there is."""
    processes = sorted(processes, key=lambda identity: (ORDER.index(identity.role), identity.index))
    if what == "all":
        return tuple(processes)
    wanted = Identity.parse(what)
    found = tuple(i for i in processes if i.role is wanted.role and ("/" not in what or i == wanted))
    if not found:
        there = ", ".join(str(identity) for identity in processes if identity.role is wanted.role)
        instead = f"there is {there}" if there else f"no {wanted.role.value} can be replaced"
        raise ValueError(f"there is no {what}; {instead}")
    return found
