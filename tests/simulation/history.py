"""Plays a scenario and checks the invariants: what clients got, and what is left when nobody wants anything any more."""

import traceback
from collections.abc import Iterator

from clients import Ask, Client, Frontend, frontend_identity
from faults import KILLS, OFF, OPERATIONS, Fault, Kind, Shape
from group import Worker
from life import Process, Violation
from msgspec.structs import replace
from replaced import simulated
from scenario import BLOCK_SIZE, PEER_TIMEOUT_S, Scenario, configs_of
from supervisors import Supervisor
from world import BEGIN_S, World

from meshlm.coordinator.io import CoordinatorApp
from meshlm.detokenizer.io import DetokenizerApp
from meshlm.protocol.operations import Resume, UpdateWeights
from meshlm.protocol.wire.ids import COORDINATOR, HEAD, Identity, Role
from meshlm.protocol.wire.session import SessionState
from meshlm.runtime.process.process import App
from meshlm.scheduler_proc.io import SchedulerApp

LIMIT_S = 40.0  # simulated, after the last fault: longer than any timeout of the mesh but the coordinator's hold
SERVES_AGAIN_S = 8.0  # likewise, until every group of workers steps; what ends by itself meanwhile is no excuse
ASKED, ASKED_AGAIN_S = 4, 3.0  # how often an operator has a paused mesh go on, and the time between
MAX_QUEUED = 1000  # frames for one peer


class History:
    """One scenario being played."""

    def __init__(self, scenario: Scenario, story: list[str] | None = None) -> None:
        self.scenario = scenario
        self.num_updates = 0
        changes = any(fault.kind is Kind.UPDATE for fault in scenario.faults)
        self.clients = [Client(ask, weights_change=changes) for ask in scenario.asks]
        self.everyone = everyone = (*scenario.supervisors, *scenario.identities)
        linked = scenario.linked
        self._peers = {
            one: [other for other in everyone if linked(one, other) or linked(other, one)] for one in everyone
        }
        self.faults = list(scenario.faults)
        self.broken: list[int] = []  # tokens that clients had which asked again
        self._num_looks = 0
        self.fault_at = BEGIN_S + 1.0  # when the last one is over
        self.world = World(
            scenario.seed,
            configs_of(scenario),
            scenario.host_of,
            self._make_app,
            self._on_arrival,
            scenario.speed_s,
            Kind.EARLY_WORD not in OFF,
            story,
        )

    def _make_app(self, identity: Identity) -> App:
        match identity.role:
            case Role.SUPERVISOR:
                return Supervisor()
            case Role.FRONTEND:
                return Frontend()
            case Role.DETOKENIZER:
                return DetokenizerApp()
            case Role.COORDINATOR:
                return CoordinatorApp()
            case Role.SCHEDULER:
                return SchedulerApp()
        scenario = self.scenario
        num_pages = scenario.num_blocks * max(1, len(scenario.kv_specs))
        return Worker(num_pages, BLOCK_SIZE, scenario.step_s, scenario.max_drafts, scenario.kv_specs)

    # --- what happens to it ---

    def _on_arrival(self, num_frames: int) -> None:
        while self.faults and self.faults[0].at_frame <= num_frames:
            self._fire(self.faults.pop(0))

    def _fire(self, fault: Fault) -> None:
        world = self.world
        self.fault_at = world.now + fault.seconds
        if fault.kind is Kind.KILL_SENDING:
            if fault.who in world.processes:
                world.processes[fault.who].sends_left = world.dice.randint(1, 3)
        elif fault.kind in KILLS:
            process = world.kill(fault.who, fault.seconds)
            if process is not None and isinstance(process.app, Frontend):
                for client in dict.fromkeys(process.app.clients):
                    if client.again():
                        self.broken.append(sum(len(got.tokens) for got in client.got))
                        other = client.ask.frontend + world.dice.randrange(self.scenario.num_frontends)
                        client.ask = replace(client.ask, frontend=other % self.scenario.num_frontends)
                        world.at(world.now + world.dice.random() ** 3 * 2.5, None, self._arrive, client)
        elif fault.kind is Kind.SCALE:
            supervisor = world.processes[HEAD]
            assert isinstance(supervisor.app, Supervisor)
            world.at(world.now, supervisor, supervisor.app.set_ranks, 1)
            world.at(world.now + fault.seconds, supervisor, supervisor.app.set_ranks, self.scenario.num_ranks)
        elif fault.kind is Kind.ROLES:
            supervisor = world.processes[HEAD]
            assert isinstance(supervisor.app, Supervisor)
            for when, number in ((world.now, 2), (world.now + fault.seconds, 1)):
                world.at(when, supervisor, supervisor.app.set_roles, number, self.scenario.num_ranks)
        elif fault.kind in OPERATIONS:
            supervisor = world.processes[HEAD]
            assert isinstance(supervisor.app, Supervisor)
            action = OPERATIONS[fault.kind]
            if fault.kind is Kind.UPDATE:
                self.num_updates += 1
                action = UpdateWeights(f"weights-{self.num_updates}")
            world.at(world.now, supervisor, supervisor.app.operate, action)
            for again in range(ASKED if fault.kind is Kind.HOLD else 0):  # a coordinator that dies tells nobody
                at = world.now + fault.seconds + again * ASKED_AGAIN_S
                world.at(at, supervisor, supervisor.app.operate, Resume())
        elif fault.kind is Kind.PAUSE:
            world.pause(fault.who, fault.seconds)
        elif fault.peer is not None and fault.kind in (Kind.CUT, Kind.CUT_ONE_WAY):
            route = (self.scenario.host_of(fault.who), self.scenario.host_of(fault.peer))
            both = (route, (route[1], route[0]))
            world.cut(both if fault.kind is Kind.CUT else (route,), fault.seconds, PEER_TIMEOUT_S)
        elif fault.peer is not None and fault.kind is Kind.LOSE_LINK:
            world.lose_link(fault.who, fault.peer)
        elif fault.peer is not None and fault.kind is Kind.TWICE:
            world.double_link(fault.who, fault.peer, fault.seconds)
        elif fault.peer is not None and fault.kind is Kind.BREAK:
            world.break_link(fault.who, fault.peer, fault.seconds)
        elif fault.peer is not None:
            world.slow_link(fault.who, fault.peer, 0.2, fault.seconds)

    def _arrive(self, client: Client) -> None:
        """A client connects, as soon as its frontend takes connections."""
        process = self.world.processes.get(frontend_identity(client.ask))
        if process is None or not process.started or not isinstance(process.app, Frontend):
            self.world.at(self.world.now + 0.03, None, self._arrive, client)
            return
        process.app.clients.append(client)
        self.world.at(self.world.now, process, process.app.take, client)

    # --- the whole ---

    def play(self) -> None:
        """Violation, or whatever the product raises."""
        world = self.world
        for identity in self.scenario.identities:
            world.start(identity, world.dice.random() ** 2 * 0.1)
        for client in self.clients:
            world.at(BEGIN_S + client.ask.at_s, None, self._arrive, client)
        while open_ones := [client for client in self.clients if not client.done]:
            self._go_on(f"{len(open_ones)} clients wait for ever: {[client.ask.number for client in open_ones]}")
        self.faults.clear()
        while reason := self._unsettled():
            self._go_on(f"never settles: {reason}")

    def _go_on(self, complaint: str) -> None:
        over_s = self.world.now - max(self.fault_at, self.world.whole_from)
        if over_s > LIMIT_S:
            raise Violation(complaint)
        self.world.advance(0.1)
        self._num_looks += 1
        if self._num_looks % 8:
            return
        for process in self.world.processes.values():
            if over_s > SERVES_AGAIN_S and isinstance(process.app, SchedulerApp) and "no workers" in leftovers(process):
                raise Violation(f"{process.identity} does not serve again")
            for peer, link in process.mesh._peers.items():
                size = len(link.session._unacked) + len(link.session._queued) + len(link.outbox.pending)
                if size > MAX_QUEUED:
                    raise Violation(f"{process.identity} keeps {size} frames for {peer}")

    def _unsettled(self) -> str:
        """What is left over; "" when the mesh is whole, idle and empty."""
        world = self.world
        for identity in self.everyone:
            process = world.processes.get(identity)
            if process is None or not process.started:
                return f"{identity} is not started"
            reason = self._links(process) or leftovers(process)
            if reason:
                return f"{identity}: {reason}"
        members = world.processes[COORDINATOR].app._core.members  # type: ignore[attr-defined]
        for identity in self.scenario.identities:
            if identity != COORDINATOR:
                member = members.get(identity)
                if member is None or member.incarnation != world.processes[identity].incarnation or not member.ready:
                    return f"the coordinator knows {identity} as {member}"
        return ""

    def _links(self, process: Process) -> str:
        processes, links = self.world.processes, process.mesh._peers
        for peer in self._peers[process.identity]:
            other, link = processes.get(peer), links.get(peer)
            if other is None:
                return f"{peer} is away"
            if link is None or link.session.state is not SessionState.OPEN:
                return f"no session with {peer}"
            if link.session.peer_incarnation != other.incarnation:
                return f"a session with the dead {peer} ({link.session.peer_incarnation})"
            if len(link.session._unacked) > 4 or link.session._queued or link.outbox.pending:
                return f"frames for {peer} pile up"
        return ""


def leftovers(process: Process) -> str:
    """What a core still holds although no client waits."""
    app = process.app
    kept: dict[str, object] = {}
    match app:
        case Frontend():
            tracker = app.client.tracker
            kept = {"choices": tracker.by_handle, "orphans": tracker.orphans, "load": any(tracker.load.values())}
            kept["not ready"] = app.readiness.not_ready_reason()
        case DetokenizerApp():
            core = app._core
            assert core is not None
            kept = {
                "journal": core.journal.by_id,
                "handles": core.journal.by_handle,
                "jobs": core.jobs,
                "batches": core.journal.open_batches,
            }
            kept["unsent"] = getattr(app, "_unsent", ())
        case CoordinatorApp():
            router = app._core
            assert router is not None
            ledger = any(rank.requests for rank in router.ranks.values())
            kept = {
                "operations": router.operations._asked,
                "owner": router.owner,
                "held": router.held,
                "ledger": ledger,
                "update": router.weights.updating,
            }
            wrong = [
                one.load.weights
                for one in router.ranks.values()
                if one.load is not None and one.load.weights is not None
            ]
            kept["weights"] = [one for one in wrong if not one.is_same(router.weights.current)]
        case Worker():
            kept = {"group": app.leftover(), "weights": app._weights.behind}
        case SchedulerApp():
            rank = app._core
            assert rank is not None
            pool = rank.batching.kv.pool
            kept = {
                "requests": rank.requests,
                "inflight": rank.inflight,
                "early": rank.table.detokenizers._early,
                "ended": rank.load.ended,
            }
            kept["operations"] = rank.operations.pending
            kept["blocks"] = pool.num_blocks - pool.num_free
            kept["no workers"] = not rank.serving
    return ", ".join(f"{name} {value}" for name, value in kept.items() if value)


def violation(scenario: Scenario, story: list[str] | None = None) -> str:
    """Play it; what went wrong, "" when nothing did."""
    with simulated():
        try:
            History(scenario, story).play()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            if story is not None:
                story.append(traceback.format_exc())
            return f"{type(error).__name__}: {error} ({where.filename.rpartition('/main/')[2]}:{where.lineno})"
    return ""


def shrunk(scenario: Scenario) -> Scenario:
    """A smaller one that goes wrong too: without the faults, clients and processes that do not matter."""

    def smaller() -> Iterator[Scenario]:
        for place in range(len(scenario.faults)):
            yield replace(scenario, faults=scenario.faults[:place] + scenario.faults[place + 1 :])
        for place in range(len(scenario.asks)):
            yield replace(scenario, asks=scenario.asks[:place] + scenario.asks[place + 1 :])
        if scenario.num_frontends > 1:
            yield replace(scenario, num_frontends=1, asks=tuple(replace(ask, frontend=0) for ask in scenario.asks))
        if scenario.num_detokenizers > 1:
            yield replace(scenario, num_detokenizers=1)
        if scenario.num_prefill_ranks:
            yield replace(scenario, num_prefill_ranks=0)
        elif scenario.num_ranks > 1 and scenario.shape is not Shape.HOSTS:
            yield replace(scenario, num_ranks=1)
        if scenario.tp_size > 1 and scenario.pp_size > 1:
            yield replace(scenario, pp_size=1)
        for place, ask in enumerate(scenario.asks):
            simple = Ask(
                number=ask.number, at_s=ask.at_s, frontend=0, prompt=ask.prompt[-1:], max_tokens=2, pool=ask.pool
            )
            if ask != simple:
                yield replace(scenario, asks=(*scenario.asks[:place], simple, *scenario.asks[place + 1 :]))

    found = True
    while found:
        found = False
        for candidate in smaller():
            if violation(candidate):
                scenario, found = candidate, True
                break
    return scenario
