"""The process group's pure core: which process should run, and what to do when one does not.

io.py calls it with what it saw (pidfds, messages, timers); it answers with what to do (events.py), and never spawns or kills itself.

A process that fails before the whole mesh was ready once ends the start: its own words are the user's answer. Once each role has had
somebody who was ready there may be clients, though: from then on only one that was never ready and fails by itself ends the start.
Any other dead process is started again, at once where it had done its job for a while, else with exponential backoff, until
`max_restarts` within `WINDOW_S` seconds are used up, or until as many incarnations in a row, however long each, ended in the same words
before they were ready. A process that is silent, or whose step does not end, is stuck: it is killed, and so replaced. All this holds
until the mesh has ended: while frontends finish their requests these still need everybody else.

Processes may be added to a running mesh and taken out of it, one change at a time. New ones are on trial until all of them are
ready: when one fails by itself, or dies too often, they are all taken away again, and nothing else is touched. Those that leave are
not started again; they are asked to stop when they are drained, or at their deadline.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from meshlm.protocol.edges.control import STEPPING
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor.group import events
from meshlm.supervisor.group.events import Effect, Event

WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
STEADY_S = 3.0  # a process that was ready for so long died of something new: no backoff
START_STALLS = 6  # a process that starts is given so many times the silence (imports and loading hold the loop)
UNSEEN_END = -256  # the exit code of a process that was another supervisor's child: its parent alone is told that
ASLEEP_S = 1.0  # between two ticks: the supervisor itself did not run, and heard nobody


class State(Enum):
    """The state of one process; the value is what `meshlm status` shows."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"  # dead, will be started at `restart_at`
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(slots=True)
class Process:
    """One place of the group, with the process that has it."""

    identity: Identity
    state: State = State.STOPPED
    incarnation: Incarnation = Incarnation(0)
    started_at: float = 0.0
    beaten_at: float = 0.0  # the last sign of life
    moved_at: float = 0.0  # when step or phase last changed
    step: int = 0
    phase: str = ""
    ready_at: float = 0.0  # of this incarnation; 0: not yet
    restarts: int = 0
    early_deaths: int = 0  # one after the other
    restart_at: float = 0.0
    deaths: list[float] = field(default_factory=list)
    last_words: str = ""
    fits: int = 0  # tokens of context that it would have room for, if that is why it fails
    early_words: list[str] = field(default_factory=list)  # the same, since one was ready or said otherwise
    has_been_ready: bool = False  # it was ready, in this incarnation or an earlier one
    on_trial: bool = False  # added, and not all that were added are ready yet
    leaves_at: float | None = None  # it leaves the mesh, at the latest then


class Group:
    """All processes of one host's mesh."""

    def __init__(
        self,
        identities: Iterable[Identity],
        max_restarts: int,
        start_deadline_s: float,
        stall_s: float = 10.0,
        step_s: float = 120.0,
        ends_steps: bool = False,
    ) -> None:
        """`stall_s` of silence, or `step_s` of one step, make a process stuck; 0: never. `ends_steps`: the mesh ends with it."""
        self.processes = {identity: Process(identity) for identity in identities}
        self.max_restarts = max_restarts
        self.start_deadline_s = start_deadline_s
        self.stall_s, self.step_s = stall_s, step_s
        self.was_ready = False  # all were, at the same time
        self._serves = False  # each role has had somebody who was ready: there may be clients
        self.stopping = False
        self._steps_go_on = ends_steps
        self._asked_steps = False  # to end
        self.gave_up = False
        self._started_at = 0.0
        self._ticked_at = 0.0
        self._last_incarnation = 0
        self._failure = ""  # why what was added is taken away again

    def handle(self, event: Event, now: float) -> list[Effect]:
        """`now` in seconds; any clock that does not go back, near enough to the epoch for incarnations."""
        if self.gave_up:
            return []
        match event:
            case events.Start():
                self._started_at = self._ticked_at = now
                return [self.spawn(process, now) for process in self.processes.values()]
            case events.Add():
                return self._add(event.identities, now)
            case events.Retire():
                return self._retire(event)
            case events.Drained():
                return [effect for identity in event.identities for effect in self._let_go(identity)]
            case events.Stop():
                return self._stop()
            case events.StepsEnded():
                self._steps_go_on = False
                alive = any(process.state is not State.STOPPED for process in self.processes.values())
                return self._ask_next() if self.stopping and alive else []
            case events.Tick():
                return self._tick(now)
        process = self.processes.get(event.identity)
        if process is None or process.incarnation != event.incarnation:
            return []  # of an incarnation that is over
        match event:
            case events.Exited():
                return self._exited(process, event, now)
            case events.BecameReady():
                return self._ready(process, now)
            case events.Beaten():
                if (process.step, process.phase) != (event.step, event.phase):
                    process.moved_at = now
                process.beaten_at, process.step, process.phase = now, event.step, event.phase
            case events.SaidFailed():
                process.last_words, process.fits = event.message, event.fits
        return []

    def spawn(self, process: Process, now: float) -> events.Spawn:
        self._last_incarnation = max(self._last_incarnation + 1, int(now * 1e9))
        process.incarnation = Incarnation(self._last_incarnation)
        process.state = State.STARTING
        process.started_at = process.beaten_at = process.moved_at = now
        process.ready_at, process.step, process.phase = 0.0, 0, ""
        process.last_words, process.fits = "", 0
        return events.Spawn(process.identity, process.incarnation)

    def _ready(self, process: Process, now: float) -> list[Effect]:
        if process.state is not State.STARTING:
            return []
        process.state, process.has_been_ready = State.READY, True
        able = {each.identity.role for each in self.processes.values() if each.state is State.READY}
        self._serves = self._serves or all(identity.role in able for identity in self.processes)
        process.ready_at = process.beaten_at = process.moved_at = now
        process.early_words.clear()
        if not self.was_ready and all(p.state is State.READY for p in self.processes.values()):
            self.was_ready = True
            return [events.AllReady()]
        if process.on_trial and all(p.state is State.READY for p in self.processes.values() if p.on_trial):
            for added in self.processes.values():
                added.on_trial = False
            return [events.Changed()]
        return []

    def adopt(self, process: Process, now: float) -> None:
        """Have a process that another supervisor left (succession.py): it may be gone, of which Exited tells, or says that it is ready.
        A mesh is left to others once all were ready."""
        self.was_ready = self._serves = True
        self._started_at = self._ticked_at = now
        self.processes[process.identity] = process

    @property
    def last_incarnation(self) -> int:
        """Of those that were given out."""
        return self._last_incarnation

    def skip_incarnations(self, last: int) -> None:
        """Another supervisor has given out those up to this one."""
        self._last_incarnation = max(self._last_incarnation, last)

    # --- processes that come and go ---

    @property
    def changing(self) -> bool:
        return any(process.on_trial or process.leaves_at is not None for process in self.processes.values())

    def _add(self, identities: Iterable[Identity], now: float) -> list[Effect]:
        added = [Process(identity, on_trial=True) for identity in identities]
        self.processes |= {process.identity: process for process in added}
        return [self.spawn(process, now) for process in added]

    def _retire(self, event: events.Retire) -> list[Effect]:
        effects: list[Effect] = []
        for identity in event.identities:
            process = self.processes[identity]
            process.leaves_at = event.deadline
            if process.state is State.BACKOFF:
                effects += self._gone(process)
        return effects

    def _let_go(self, identity: Identity) -> list[Effect]:
        process = self.processes.get(identity)
        if process is None or process.leaves_at is None or process.state is State.STOPPING:
            return []
        process.state = State.STOPPING
        return [events.AskToStop(identity)]

    def _gone(self, process: Process) -> list[Effect]:
        del self.processes[process.identity]
        if self.changing:
            return []
        failure, self._failure = self._failure, ""
        return [events.Changed(failure)]

    def _withdraw(self, words: str, now: float) -> list[Effect]:
        self._failure = words
        effects: list[Effect] = []
        for process in [process for process in self.processes.values() if process.on_trial]:
            process.on_trial, process.leaves_at = False, now
            if process.state in (State.STARTING, State.READY):
                process.state = State.STOPPING
                effects.append(events.Kill(process.identity))
            elif process.state is State.BACKOFF:
                effects += self._gone(process)
        return effects

    # --- deaths ---

    def _exited(self, process: Process, event: events.Exited, now: float) -> list[Effect]:
        if self.stopping and (process.leaves_at is not None or not self._is_needed(process)):
            return self._stopped(process)
        words = process.last_words or event.reason
        was_killed = not words and event.code < 0
        words = words or f"{process.identity} ended without a word ({exit_text(event.code)})"
        if not self.was_ready and not (self._serves and (was_killed or process.has_been_ready)):
            return self._stopped(process) if self.stopping else self._give_up(words, process.fits)
        died = events.TellDied(process.identity, process.incarnation)
        by_itself = not was_killed and not process.has_been_ready
        if process.on_trial and (by_itself or self._too_often(process, words, now)):
            process.state = State.STOPPED
            return [died, *self._withdraw(words, now), *self._gone(process)]
        if process.leaves_at is not None:
            return [died, *self._gone(process)]
        counts = not (event.has_requests or process.on_trial)
        if counts and (text := self._too_often(process, words, now)):
            return self._stopped(process) if self.stopping else self._give_up(text)
        process.state = State.BACKOFF
        process.restarts += 1
        steady = process.ready_at and now - process.ready_at >= STEADY_S
        process.early_deaths = 0 if steady else process.early_deaths + 1
        nth = process.early_deaths
        process.restart_at = now + (min(FIRST_BACKOFF_S * 2.0 ** min(nth - 2, 10), MAX_BACKOFF_S) if nth > 1 else 0.0)
        return [died, *self._tick(now)]

    def _too_often(self, process: Process, words: str, now: float) -> str:
        """Why a process that died now is not started again; "" when it is."""
        process.deaths = [at for at in process.deaths if now - at < WINDOW_S] + [now]
        if len(process.deaths) > self.max_restarts:
            return f"{process.identity} died {len(process.deaths)} times in {WINDOW_S:.0f} s; the last time: {words}"
        if process.state is State.STARTING:
            process.early_words = [*(said for said in process.early_words if said == words), words]
        if (count := len(process.early_words)) > self.max_restarts:
            return f"{process.identity} died {count} times in a row before it was ready, each time with: {words}"
        return ""

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._forgive_own_sleep(now)
        if not self.stopping and (overdue := self._overdue(now)):
            names = ", ".join(map(str, overdue))
            text = f"not ready after {self.start_deadline_s:.0f} s (--startup-timeout): {names}"
            if not self.was_ready:
                return self._give_up(text)
            effects += self._withdraw(text, now)
        for process in self.processes.values():
            if process.leaves_at is not None and now >= process.leaves_at:
                effects += self._let_go(process.identity)
            elif process.state is State.BACKOFF and now >= process.restart_at:
                effects.append(self.spawn(process, now))
            elif reason := self._stuck(process, now):
                process.beaten_at = process.moved_at = now
                effects.append(events.Replace(process.identity, reason))
        return effects

    def _overdue(self, now: float) -> list[Identity]:
        """The processes that a start or a change waits for, where one has taken too long. A new incarnation has its own time."""
        wanted = (p for p in self.processes.values() if p.on_trial or not self.was_ready)
        awaited = [p for p in wanted if p.state is not State.READY]
        late = any(p.state is State.STARTING and now - p.started_at > self.start_deadline_s for p in awaited)
        return [process.identity for process in awaited] if late else []

    def _forgive_own_sleep(self, now: float) -> None:
        """This process was stopped, or the clock jumped: nobody else was silent for that long."""
        asleep = now - self._ticked_at
        self._ticked_at = now
        if asleep > ASLEEP_S:
            for process in self.processes.values():
                process.beaten_at, process.moved_at = process.beaten_at + asleep, process.moved_at + asleep

    def _stuck(self, process: Process, now: float) -> str:
        """Why this process must be replaced; "" when it need not."""
        if process.state not in (State.STARTING, State.READY) or not self._serves:
            return ""
        if not process.has_been_ready and not self.was_ready:
            return ""  # the first start has a limit of its own
        limit_s = self.stall_s * (START_STALLS if process.state is State.STARTING else 1)
        if limit_s and now - process.beaten_at > limit_s:
            return f"no sign of life for {limit_s:g} s (--stall-timeout) in phase {process.phase or 'starting'!r}"
        if self.step_s and process.phase == STEPPING and now - process.moved_at > self.step_s:
            return f"step {process.step + 1} does not end for {self.step_s:g} s (--step-timeout)"
        return ""

    def _stop(self) -> list[Effect]:
        if self.stopping:
            return []
        self.stopping = True
        for process in self.processes.values():
            process.on_trial = False
        return self._ask_next()

    def _ask_next(self) -> list[Effect]:
        """Frontends end first: they let running requests finish, which needs everybody else. Then the steps, so that no worker ends
        while others wait for it in one."""
        asked: list[Effect] = []
        for process in self.processes.values():
            if process.state is State.BACKOFF and not self._is_needed(process):
                process.state = State.STOPPED
        living = [p for p in self.processes.values() if p.state is not State.STOPPED]
        if living and not self._frontends() and self._steps_go_on and self.was_ready:
            asks, self._asked_steps = not self._asked_steps, True
            return [events.EndSteps()] if asks else []
        for process in self._frontends() or living:
            if process.state is not State.STOPPING:
                process.state = State.STOPPING
                asked.append(events.AskToStop(process.identity))
        return asked if living else [events.AllStopped()]

    def _frontends(self) -> list[Process]:
        return [p for p in self.processes.values() if p.identity.role is Role.FRONTEND and p.state is not State.STOPPED]

    def _is_needed(self, process: Process) -> bool:
        """Whether frontends that finish their requests need this one."""
        alive = [frontend for frontend in self._frontends() if frontend.state is not State.BACKOFF]
        return process.identity.role is not Role.FRONTEND and bool(alive)

    def _stopped(self, process: Process) -> list[Effect]:
        process.state = State.STOPPED
        return self._ask_next()

    def _give_up(self, message: str, fits: int = 0) -> list[Effect]:
        self.gave_up = True
        return [events.GiveUp(message, fits)]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        incarnations = [p.incarnation for p in self.processes.values() if p.incarnation]
        assert len(set(incarnations)) == len(incarnations), "two processes share an incarnation"
        for process in self.processes.values():
            often = max(len(process.deaths), len(process.early_words))
            assert often <= self.max_restarts + 1, f"{process.identity} died too often to be alive"
            assert not (self.stopping and process.state is State.BACKOFF and not self._is_needed(process))
            assert not (process.on_trial and process.leaves_at is not None), "it comes and goes"
            assert process.leaves_at is None or process.state is not State.BACKOFF, "one that leaves is not started"


def exit_text(code: int) -> str:
    """'exit code 1' or 'signal 9'. Model files are mapped: whoever reads one that has become shorter is ended by SIGBUS."""
    if code == UNSEEN_END:
        return "how is not known: the supervisor that had started it died before"
    if code == -signal.SIGBUS:
        return f"signal {-code}: a mapped file, of weights or a vocabulary say, was cut short while it was read"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
