"""A history: a mesh, its clients, its faults. `make` draws one from a seed, `run` plays it and checks the invariants."""

import os
import random
import traceback
from collections.abc import Iterator
from enum import Enum

from clients import Ask, Client, Frontend, frontend_identity
from mock_worker import VOCAB, MockWorker
from msgspec import Struct
from msgspec.structs import replace
from world import BEGIN_S, Process, Supervisor, Violation, World, simulated

from meshlm.coordinator.io import CoordinatorApp
from meshlm.detokenizer.io import DetokenizerApp
from meshlm.protocol import config as cfg
from meshlm.protocol.ids import Identity, Role
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.session import SessionState
from meshlm.runtime.mesh import SUPERVISOR
from meshlm.runtime.process import App
from meshlm.scheduler_proc.io import SchedulerApp

LIMIT_S = 40.0  # simulated, after the last fault: longer than any timeout of the mesh but the coordinator's hold
MAX_QUEUED = 1000  # frames for one peer
BLOCK_SIZE = 2
MAX_MODEL_LEN = 40
C0 = Identity(Role.COORDINATOR)


class Kind(Enum):
    """What goes wrong."""

    KILL_FRONTEND = "kill frontend"
    KILL_DETOKENIZER = "kill detokenizer"
    KILL_COORDINATOR = "kill coordinator"
    KILL_SCHEDULER = "kill scheduler"
    KILL_WORKER = "kill worker"
    BREAK = "break a connection: some of what is in flight is lost"
    SLOW = "slow a link down: replays, and everything comes twice"
    PAUSE = "pause a process"
    UNTOLD_DEATH = "a process dies while another one has no link with the supervisor yet"
    EARLY_WORD = "a peer is heard before App.start has run"


# What the product cannot take yet, and why. An entry goes when its bug is mended; MESHLM_SIM_ALL=1 ignores them all.
OFF: dict[Kind, str] = {
    Kind.UNTOLD_DEATH: "supervisor/io.py _tell_all tells a death to the children that have a link with it at that moment only; one that"
    " is starting may keep its session with a dead coordinator for ever. Off: the simulated supervisor tells late children too",
    Kind.EARLY_WORD: "frontend/io.py on_peer_up before start() is an AssertionError in _send, and that detokenizer is never used",
}
if os.environ.get("MESHLM_SIM_ALL"):
    OFF.clear()

KILLS = {
    Kind.KILL_FRONTEND: Role.FRONTEND,
    Kind.KILL_DETOKENIZER: Role.DETOKENIZER,
    Kind.KILL_COORDINATOR: Role.COORDINATOR,
    Kind.KILL_SCHEDULER: Role.SCHEDULER,
    Kind.KILL_WORKER: Role.WORKER,
}
FAULTS = (*KILLS, Kind.BREAK, Kind.SLOW, Kind.PAUSE)  # the others are always there, unless they are OFF


class Fault(Struct, frozen=True):
    """Happens when that many frames have arrived anywhere (or at the latest when nothing else happens)."""

    at_frame: int
    kind: Kind
    who: Identity
    peer: Identity | None = None
    seconds: float = 0.0


class Scenario(Struct, frozen=True, kw_only=True):
    seed: int
    num_frontends: int
    num_detokenizers: int
    num_ranks: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    async_depth: int
    prefix_caching: bool
    speed_s: float  # of the network
    step_s: float
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def identities(self) -> list[Identity]:
        counts = {
            Role.WORKER: self.num_ranks,
            Role.COORDINATOR: 1,
            Role.SCHEDULER: self.num_ranks,
            Role.DETOKENIZER: self.num_detokenizers,
            Role.FRONTEND: self.num_frontends,
        }
        return [Identity(role, index) for role, count in counts.items() for index in range(count)]


LINKS = (
    (Role.FRONTEND, Role.DETOKENIZER),
    (Role.FRONTEND, Role.COORDINATOR),
    (Role.DETOKENIZER, Role.COORDINATOR),
    (Role.DETOKENIZER, Role.SCHEDULER),
    (Role.SCHEDULER, Role.COORDINATOR),
    (Role.SCHEDULER, Role.WORKER),
    (Role.WORKER, Role.COORDINATOR),
)


def linked(one: Identity, other: Identity) -> bool:
    """Whether these two should have a session when all is well."""
    if (one.role, other.role) not in LINKS:
        return False
    return one.index == other.index if other.role is Role.WORKER else True


# --- drawing ---


def make(seed: int, kinds: tuple[Kind, ...] = ()) -> Scenario:
    """Where `kinds` does not say, some histories have one kind of fault and some have all."""
    dice = random.Random(seed)
    draw = dice.random
    kinds = kinds or (FAULTS if draw() < 0.6 else (dice.choice(FAULTS),))
    plain = Scenario(
        seed=seed,
        num_frontends=1 + (draw() < 0.25),
        num_detokenizers=1 + (draw() < 0.4),
        num_ranks=1 + (draw() < 0.4),
        num_blocks=dice.choice((20, 24, 40)),
        max_num_batched_tokens=dice.choice((8, 16, 40)),
        max_num_seqs=dice.choice((2, 8)),
        async_depth=dice.choice((1, 2, 2, 3)),
        prefix_caching=draw() < 0.8,
        speed_s=dice.choice((1e-4, 1e-3, 1e-2)),
        step_s=dice.choice((1e-3, 1e-2, 5e-2)),
        asks=(),
        faults=(),
    )
    asks = tuple(_ask(dice, number, plain.num_frontends) for number in range(dice.randint(1, 4)))
    faults = tuple(_faults(dice, plain.identities, kinds, dice.choice((0, 1, 1, 2, 2, 3, 3, 4))))
    return replace(plain, asks=asks, faults=faults)


def _ask(dice: random.Random, number: int, num_frontends: int) -> Ask:
    draw = dice.random
    shared = (7, 8, 9, 7, 8, 9)[: dice.randrange(7)]
    max_tokens = dice.randint(1, 14)
    return Ask(
        number=number,
        at_s=draw() * 0.6,
        frontend=dice.randrange(num_frontends),
        prompt=(*shared, *(dice.randrange(VOCAB) for _ in range(dice.randint(1, 8)))),
        max_tokens=max_tokens,
        num_choices=1 + (draw() < 0.2),
        stop_ids=tuple(dice.randrange(VOCAB) for _ in range(4)) if draw() < 0.3 else (),
        stops=tuple(dice.choice("abcdefghi") + dice.choice("abcdefgh") for _ in range(3)) if draw() < 0.3 else (),
        include_stop=draw() < 0.5,
        leave_after=dice.randint(0, max_tokens) if draw() < 0.2 else -1,
    )


def _faults(dice: random.Random, identities: list[Identity], kinds: tuple[Kind, ...], count: int) -> list[Fault]:
    """The first anywhere; each other one often soon after the one before."""
    found: list[Fault] = []
    at = 0
    for _ in range(count):
        at += dice.randrange(20) if found and dice.random() < 0.5 else dice.randrange(300)
        kind = dice.choice(kinds)
        candidates = [one for one in identities if kind not in KILLS or one.role is KILLS[kind]]
        who = dice.choice(candidates)
        if kind in KILLS:
            found.append(Fault(at, kind, who, None, dice.random() ** 2 * 2.0))
        elif kind is Kind.PAUSE:
            found.append(Fault(at, kind, who, None, dice.choice((0.01, 0.2, 2.5)) * dice.random()))
        else:
            pairs = [(a, b) for a in identities for b in identities if linked(a, b) or linked(b, a)]
            who, peer = dice.choice(pairs)
            found.append(Fault(at, kind, who, peer, dice.choice((0.01, 0.2, 2.5)) * dice.random()))
    return found


# --- playing ---


_SPEC = ModelSpec(
    architecture="fake",
    vocab_size=VOCAB,
    hidden_size=1,
    intermediate_size=1,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=1,
    max_position_embeddings=MAX_MODEL_LEN,
)


def config_of(scenario: Scenario) -> cfg.MeshConfig:
    resolved = cfg.Resolved(
        spec=_SPEC,
        model_path="",
        tokenizer_path="",
        chat_template="",
        served_names=("m",),
        generation_defaults={},
        load_format="dummy",
        device="fake",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        eos_token_ids=(),
        digest="",
    )
    return cfg.MeshConfig(
        cache=cfg.CacheConfig(enable_prefix_caching=scenario.prefix_caching),
        scheduler=cfg.SchedulerConfig(async_depth=scenario.async_depth),
        parallel=cfg.ParallelConfig(data_parallel_size=scenario.num_ranks),
        run=cfg.RunConfig(run_dir="/sim"),
        resolved=resolved,
    )


class History:
    """One scenario being played."""

    def __init__(self, scenario: Scenario, story: list[str] | None = None) -> None:
        self.scenario = scenario
        self.clients = [Client(ask) for ask in scenario.asks]
        self.faults = list(scenario.faults)
        self.fault_at = BEGIN_S + 1.0  # when the last one is over
        self.world = World(
            scenario.seed,
            config_of(scenario),
            self._make_app,
            self._on_arrival,
            scenario.speed_s,
            Kind.EARLY_WORD not in OFF,
            story,
        )

    def _make_app(self, identity: Identity) -> App:
        match identity.role:
            case Role.SUPERVISOR:
                return Supervisor(tells_late_children=Kind.UNTOLD_DEATH in OFF)
            case Role.FRONTEND:
                return Frontend()
            case Role.DETOKENIZER:
                return DetokenizerApp()
            case Role.COORDINATOR:
                return CoordinatorApp()
            case Role.SCHEDULER:
                return SchedulerApp()
        return MockWorker(self.scenario.num_blocks, BLOCK_SIZE, self.scenario.step_s)

    # --- what happens to it ---

    def _on_arrival(self, num_frames: int) -> None:
        while self.faults and self.faults[0].at_frame <= num_frames:
            self._fire(self.faults.pop(0))

    def _fire(self, fault: Fault) -> None:
        world = self.world
        self.fault_at = world.now + fault.seconds
        if fault.kind in KILLS:
            process = world.kill(fault.who, fault.seconds)
            if process is not None and isinstance(process.app, Frontend):
                for client in process.app.clients:
                    client.left = True
        elif fault.kind is Kind.PAUSE:
            world.pause(fault.who, fault.seconds)
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
        self.world.at(self.world.now, process, process.app.ask, client)

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
        if self.world.now > self.fault_at + LIMIT_S:
            raise Violation(complaint)
        self.world.advance(0.1)
        for process in self.world.processes.values():
            for peer, link in process.mesh._peers.items():
                size = len(link.session._unacked) + len(link.session._queued) + len(link.outbox.pending)
                if size > MAX_QUEUED:
                    raise Violation(f"{process.identity} keeps {size} frames for {peer}")

    def _unsettled(self) -> str:
        """What is left over; "" when the mesh is whole, idle and empty."""
        world = self.world
        for identity in (SUPERVISOR, *self.scenario.identities):
            process = world.processes.get(identity)
            if process is None or not process.started:
                return f"{identity} is not started"
            reason = self._links(process) or leftovers(process)
            if reason:
                return f"{identity}: {reason}"
        members = world.processes[C0].app._core.members  # type: ignore[attr-defined]
        for identity in self.scenario.identities:
            if identity != C0:
                member = members.get(identity)
                if member is None or member.incarnation != world.processes[identity].incarnation or not member.ready:
                    return f"the coordinator knows {identity} as {member}"
        return ""

    def _links(self, process: Process) -> str:
        for peer, other in self.world.processes.items():
            if not (linked(process.identity, peer) or linked(peer, process.identity)):
                continue
            link = process.mesh._peers.get(peer)
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
            desk = app._desk
            kept = {"choices": desk.by_handle, "orphans": desk.orphans, "load": any(desk.load.values())}
            kept["not ready"] = app.not_ready_reason()
        case DetokenizerApp():
            core = app._core
            assert core is not None
            kept = {"journal": core.by_id, "handles": core.by_handle, "jobs": core.jobs, "batches": core._batches}
            kept["unsent"] = getattr(app, "_unsent", ())
        case CoordinatorApp():
            ranks = app._core.ranks.values()
            kept = {"owner": app._core.owner, "held": app._core.held, "ledger": any(rank.requests for rank in ranks)}
        case SchedulerApp():
            rank = app._core
            assert rank is not None
            pool = rank.batching.pool
            kept = {"requests": rank.requests, "inflight": rank.inflight, "early": rank._early, "ended": rank._ended}
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
        if scenario.num_ranks > 1:
            yield replace(scenario, num_ranks=1)
        for place, ask in enumerate(scenario.asks):
            simple = Ask(number=ask.number, at_s=ask.at_s, frontend=0, prompt=ask.prompt[-1:], max_tokens=2)
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
