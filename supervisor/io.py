"""The supervisor's links and timers: hands what happens to the group (rolling.py) and does what it decides.

Used by `meshlm serve` and by the Python API, each in an event loop of its own.
"""

import asyncio
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges import control as edge
from meshlm.protocol.operations import Action, OperationDone, Stop
from meshlm.protocol.timeline import TimelinePart
from meshlm.protocol.wire.ids import HEAD, Identity, Incarnation, Role
from meshlm.runtime.errors import LinkDown, ProcessFatal
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.mesh.operations import AskedOperations
from meshlm.supervisor import control, requests_of_frontends
from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.errors import ContextDoesNotFit, StartError, raised_as
from meshlm.supervisor.group import clock, events, rolling
from meshlm.supervisor.group.operations import Operations
from meshlm.supervisor.nodes import network
from meshlm.supervisor.processes import children, report, rundir
from meshlm.supervisor.processes.incarnations import Incarnations, KnownDeaths
from meshlm.supervisor.ranks import Ranks
from meshlm.supervisor.recordings import Recordings
from meshlm.supervisor.settings import changes
from meshlm.supervisor.succession import Kept, Succession

TICK_S = 0.1
QUIET = (events.Beaten, events.Tick)  # events without effects, of which the next supervisor need not know
STEPS_END_S = 2.0  # so long the mesh has to end its steps, before its processes are asked to end
GONE_S = 10.0  # that killed processes have for being gone: a GPU's driver takes some time to free what they had
KILL_AFTER_S = 5.0  # a child asked to stop has its drain time and this much more


class Supervisor:
    """Runs one host's process group until `stop` is called or a process cannot be kept alive."""

    def __init__(
        self, config: MeshConfig, members: list[Identity], display: StartDisplay, succession: Succession | None = None
    ) -> None:
        self.config = config
        self.ready = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._display, self.line = display, display.line
        self._run_dir, self._drain_s = Path(config.run.run_dir), config.run.drain_timeout
        self._deaths = KnownDeaths()
        self._rolling = rolling.Rolling.of_mesh(members, config)
        self._group = self._rolling.group
        self.operations = Operations(self._rolling, self._do, self._refuse, self.stop, self._elsewhere, self.send)
        self._loop = asyncio.get_running_loop()
        self._clock = clock.steady()  # the group's
        self._timer: asyncio.TimerHandle | None = None
        self._mesh: Mesh | None = None
        self._status = control.ControlServer(self._answer)
        self._steps_end: asyncio.Task[None] | None = None
        self._incarnations = Incarnations(lambda: self.config, self._do)
        self._begun = False
        self._network: network.Head | network.Guest | None = None
        if is_guest := config.node is not None and bool(config.node.head):
            self._network = network.Guest(config, self)
        elif config.node is not None:
            self._network = network.Head(config, self)
        self._ranks = Ranks(self, self._rolling, self._do, self._clock)
        self.recordings = Recordings(self._run_dir, self.linked, self.send, self._elsewhere, is_guest, self.operate)
        self.changed_settings: dict[str, str | int | float] = {}  # since the start, for nodes that join later
        self._beats: dict[Identity, edge.Heartbeat] = {}  # the last one of each incarnation
        self._succession = succession or Succession(None)
        parts = (self._rolling, self._incarnations, self._deaths, self.operations, self._ranks.scaling, self._clock)
        self._succession.of(self, Kept(*parts))

    async def start(self) -> None:
        """Open the inbox, spawn all. Progress and the outcome come later, by `ready` and `ended`."""
        self._incarnations.environment = children.prepared(self.config, self._display.line)
        me = Identity(Role.SUPERVISOR, self.config.node.index if self.config.node else 0)
        self._mesh = Mesh(me, self._succession.incarnation, self.config, self)
        self._mesh.on_refused = self._refused
        self._asked = AskedOperations(self._mesh.send)
        with raised_as(StartError, ProcessFatal, OSError):
            await self._mesh.open()
            await self._status.open(self._run_dir)
        if self._succession.left is not None:
            self._begun = True
            self.ready.set()
            self._succession.take_over()
        elif self._network is not None:
            self._network.begin()
        else:
            self.begin()
        self._tick()

    def begin(self) -> None:
        """Spawn all, once. A node that joins another waits with it for the head's welcome."""
        if not self._begun:
            self._begun = True
            self._do(events.Start())

    def stop(self, drain_s: float | None = None) -> None:
        """End all in good order: frontends drain for `drain_s` (--drain-timeout), then the rest."""
        self._drain_s = self._drain_s if drain_s is None else drain_s
        if not self._begun:
            self._finish(None)
            return
        self._succession.stops(self._drain_s)
        self._loop.call_later(self._drain_s + KILL_AFTER_S, self.kill)
        for peer in self.linked(Role.FRONTEND):
            if self._incarnations.of(peer) is None:  # `meshlm launch` added it, and ends it when the mesh is gone
                self.send(peer, edge.Shutdown(self._drain_s))
        self._do(events.Stop())

    def kill(self) -> None:
        self._incarnations.kill_all()
        self._finish(None)

    async def close(self) -> None:
        """Release sockets and files, after `ended`."""
        if self._timer:
            self._timer.cancel()
        if self._steps_end is not None:
            self._steps_end.cancel()
        self._succession.stops(0.0)
        await self._incarnations.end_all(GONE_S)
        self._status.close()
        if self._mesh:
            await self._mesh.close()
        self._succession.end()

    # --- what the mesh tells us (runtime App) ---

    def on_message(self, peer: Identity, message: Struct) -> None:
        if peer.role is Role.SUPERVISOR:
            if self._network is not None:
                self._network.on_message(peer, message)
            return
        if isinstance(message, edge.AskProcesses):  # a frontend that `meshlm launch` added may ask, too
            news = (one for one in self._display.news if one.at_s > message.news_since_s)
            self.send(peer, report.for_frontend(self.status(), news))
        passed_on = requests_of_frontends.pass_on(peer, message, self.linked(Role.FRONTEND), self.send)
        child = self._incarnations.of(peer)
        if passed_on or self._ranks.asked(peer, message) or child is None:
            return
        incarnation = child.incarnation
        match message:
            case edge.Progress():
                self._display.progress(peer, message)
            case edge.Ready():
                facts = ", ".join(f"{name} {value}" for name, value in message.facts.items())
                self._display.line(f"{peer} is ready" + (f": {facts}" if facts else ""))
                self._do(events.BecameReady(peer, incarnation))
            case edge.Failed():
                self._do(events.SaidFailed(peer, incarnation, message.message, message.fits))
            case edge.Heartbeat():
                self._beats[peer] = message
                self._do(events.Beaten(peer, incarnation, message.step, message.phase))
            case edge.ChangeSettings():
                if why := self.change(message.values):  # the mesh is another one since the frontend looked at them
                    self.line(f"settings stay as they are: {why}")
            case edge.OpenRequests():
                self.operations.num_open[peer] = message.num_open
            case TimelinePart():
                self.recordings.came(message)
            case OperationDone():
                self._asked.answered(message)
            case edge.RankDrained():
                self._ranks.drained(message.dp_rank)

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        """A child's link is open. It may have met processes that died before it could be told."""
        if peer.role is Role.SUPERVISOR and self._network is not None:
            self._network.on_up(peer)
            return
        for died in self._deaths.for_newcomers():
            self.send(peer, died)
        self._succession.tell(peer)
        if peer.role is Role.FRONTEND and self.operations.refusing:
            self.send(peer, edge.Refuse(True))
        if peer.role is Role.COORDINATOR:
            self._ranks.tell()  # it may have been started before the last change
            self._asked.coordinator_up()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        """Deaths of children are the pidfds' to see."""
        if peer.role is Role.SUPERVISOR and self._network is not None:
            self._network.on_down(peer, reason)
            self.operations.node_lost(peer)
        elif peer.role is Role.COORDINATOR:
            self._asked.coordinator_lost()

    def flush(self) -> None:
        """Nothing is batched here."""

    async def operate(self, action: Action) -> OperationDone:
        """Have it done in every worker of the mesh. TimeoutError."""
        return await self._asked.ask(action)

    async def _end_steps(self) -> None:
        """Ends the steps in order with the plans, if the mesh answers soon; else processes end as they are."""
        try:
            async with asyncio.timeout(STEPS_END_S):
                failure = (await self.operate(Stop())).error
        except TimeoutError:
            failure = f"no answer in {STEPS_END_S:g} s"
        self._display.line(f"steps may be cut off: {failure}" if failure else "all steps have ended")
        self._do(events.StepsEnded())

    # --- the group's decisions ---

    def _do(self, event: rolling.Event) -> None:
        if isinstance(event, rolling.Restart):
            self._incarnations.end_warm()
            self._succession.renew()
        effects = self._rolling.roll(event, self._clock())
        for effect in effects:
            self._perform(effect)
        if effects or not isinstance(event, QUIET):
            self._succession.keep()

    def _perform(self, effect: rolling.Effect) -> None:
        match effect:
            case events.Spawn():
                self._spawn(effect.identity, effect.incarnation)
            case events.TellDied():
                if not self._rolling.restarting:
                    again, ends = effect.identity in self._group.processes, self._incarnations.ends
                    self._display.line(*report.death(effect.identity, ends, is_started_again=again))
                left = self._incarnations.left.get(effect.identity)
                died = edge.Died(effect.identity, effect.incarnation, left.in_hand if left is not None else ())
                self.tell_died(died)
                if self._network is not None:
                    self._network.died(died)
            case events.AskToStop() if self._group.stopping:
                self._ask_to_stop(effect.identity)  # `stop` has set the limit for all
            case events.AskToStop():
                self._ask_to_leave(effect.identity)
            case events.EndSteps():
                self._steps_end = self._loop.create_task(self._end_steps())
            case events.Replace():
                self._replace(effect)
            case events.Kill():
                self._incarnations.kill(effect.identity)
            case events.Changed():
                self._ranks.changed(effect.failure)
            case rolling.Prepare():
                self._incarnations.prepare(effect.identity)
            case rolling.AskToLeave():
                self._ask_to_leave(effect.identity)
            case rolling.Say():
                self._say(effect.text)
            case rolling.Outcome():
                self._display.line(effect.failure or "all were replaced")
                self._incarnations.kill_standbys()
                self.operations.over(effect.failure)
            case events.AllReady():
                self.ready.set()
                self._succession.begin()
            case events.AllStopped():
                if self._network is not None:
                    self._network.ended()
                self._finish(None)
            case events.GiveUp():
                missing = self._network.missing() if self._network is not None and not self.ready.is_set() else ""
                self._finish(f"{effect.message}; no node has {missing}" if missing else effect.message, effect.fits)

    def _spawn(self, identity: Identity, incarnation: Incarnation) -> None:
        self.operations.num_open.pop(identity, None)
        self._beats.pop(identity, None)
        self._incarnations.spawn(identity, incarnation)

    def _replace(self, effect: events.Replace) -> None:
        stopped = self._incarnations.end_stuck(effect.identity)
        more = ", stopped by a signal" if stopped else f"; its stacks: {rundir.stacks_file(effect.identity)}"
        self._display.line(f"{effect.identity} is replaced: {effect.reason}{more}", "error")

    def _ask_to_leave(self, identity: Identity) -> None:
        """Another process is there for it, or the mesh is to be smaller; it is killed when it takes too long."""
        self._ask_to_stop(identity, handover=identity.role is Role.FRONTEND)
        drain_s = self._drain_s if identity.role is Role.FRONTEND else 0.0
        self._incarnations.kill_in(identity, drain_s + KILL_AFTER_S)

    def _say(self, text: str) -> None:
        self._display.line(text)
        self.operations.say(text)

    def _refuse(self, on: bool) -> None:
        self._succession.keep()
        for peer in self.linked(Role.FRONTEND):
            self.send(peer, edge.Refuse(on))

    def _ask_to_stop(self, identity: Identity, handover: bool = False) -> None:
        drain_s = self._drain_s if identity.role is Role.FRONTEND else 0.0
        child = self._incarnations.of(identity)
        if child is None:
            return
        if self._mesh is not None and self._mesh.incarnation_of(identity) == child.incarnation:
            self._mesh.send(identity, edge.Shutdown(drain_s, handover))
        else:
            child.send_signal(signal.SIGTERM)

    def send(self, peer: Identity, message: Struct) -> bool:
        """False when there is no link: it died too, and its next incarnation is told."""
        assert self._mesh is not None
        try:
            self._mesh.send(peer, message)
        except LinkDown:
            return False
        return True

    def change(self, values: dict[str, str | int | float]) -> str:
        """Have these settings in all processes, those of other nodes and later ones too; why not, "" where it is done."""
        message = edge.ChangeSettings(values)
        try:
            self.config = changes.applied(message, self.config, self._mesh.identity if self._mesh is not None else None)
        except ValueError as error:
            return str(error)
        self.changed_settings |= values
        self._succession.keep()
        heads = self.config.node is None or not self.config.node.head
        for role in Role:
            for peer in self.linked(role) if heads or role is not Role.SUPERVISOR else ():
                self.send(peer, message)
        self.line(changes.said(values))
        return ""

    # --- what network.py asks for ---

    def tell_died(self, died: edge.Died) -> None:
        """Tell all children of a death, here or on another node; those that come later, too."""
        if self._deaths.learn(died):
            for peer in (one for role in Role if role is not Role.SUPERVISOR for one in self.linked(role)):
                self.send(peer, died)

    def deaths(self) -> Iterable[edge.Died]:
        return self._deaths.last()

    def linked(self, role: Role) -> list[Identity]:
        return self._mesh.peers(role) if self._mesh is not None else []

    def _elsewhere(self) -> dict[Identity, Identity]:
        return self._network.processes() if self._network is not None else {}

    def fail(self, message: str) -> None:
        self._finish(message)

    def _refused(self, peer: Identity, reason: str) -> None:
        if isinstance(self._network, network.Guest) and peer == HEAD:
            self._network.refused(reason)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)  # first: a turn that fails is not the last
        if self._begun:
            self._do(events.Tick())
            self._incarnations.keep_warm(self._rolling.to_keep_warm(self.config.run.standby_roles), self._loop.time())
            self._succession.tick(self._loop.time())
        if self._network is not None:
            self._network.tick()

    def _finish(self, failure: str | None, fits: int = 0) -> None:
        if failure is not None and not self.ended.done():
            self.ended.set_exception(ContextDoesNotFit(failure, fits) if fits else StartError(failure))
        elif not self.ended.done():
            self.ended.set_result(None)

    # --- status ---

    def _answer(self, request: dict[str, object]) -> object:
        match request.get("command"):
            case "status":
                return msgspec.to_builtins(self.status())
            case control.ATTACH:
                place = self._status.place(request, self._group.processes)
                return {"place": str(place), "config": msgspec.to_builtins(self.config)}
            case "set":
                return changes.answer(request, self.config, self.change)
            case "scale":
                error = self._ranks.scale(request.get("dp"), request.get("drain_s", self._drain_s))
                return {"error": error} if error else msgspec.to_builtins(self.status())
            case command if command in Recordings.COMMANDS:
                return self.recordings.answer(request, self._clock())
            case command if command in Operations.COMMANDS:
                return self.operations.answer(request)
            case unknown:
                known = ", ".join(("status", "set", "scale", *Recordings.COMMANDS, *Operations.COMMANDS))
                return {"error": f"unknown command {unknown!r}; known: {known}"}

    def status(self) -> control.MeshStatus:
        """The state of all processes, the supervisor first."""
        return report.mesh_status(
            self.config, self._group.processes.values(), self._incarnations, self._network, self._ranks.scaling, self._beats,
            self._mesh.sent() if self._mesh is not None else {},
            was_ready=self.ready.is_set(), now=self._clock(), spares=self._succession.standbys(),
        )  # fmt: skip
