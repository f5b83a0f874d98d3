"""What a history is made of: a mesh, its clients, its faults. `make` draws one from a seed."""

import random

from clients import Ask
from faults import CUTS, ENDS, FAULTS, KILLS, OPERATIONS, SHAPES, Fault, Kind, Shape
from mock_worker import VOCAB
from msgspec import Struct
from msgspec.structs import replace
from tiny_models import resolved_of, spec_of
from two_hosts import HEAD_PORT, address_of

from meshlm.protocol import config as cfg
from meshlm.protocol.kv import ChunkedAttention, CrossAttention, FullAttention, KVSpec, RecurrentState, SlidingWindow
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.wire.ids import HEAD, Identity, Role
from meshlm.runtime.mesh import tcp
from meshlm.supervisor.settings import placement

BLOCK_SIZE = 2
GROUPS: tuple[tuple[KVSpec, ...], ...] = (
    *((),) * 3,
    (FullAttention(), SlidingWindow(5)),
    (FullAttention(), SlidingWindow(3), SlidingWindow(3)),
    (SlidingWindow(4),),
    (FullAttention(), ChunkedAttention(6), ChunkedAttention(6)),
)
STATES: tuple[tuple[KVSpec, ...], ...] = (
    (FullAttention(), RecurrentState("align")),
    (FullAttention(), RecurrentState("all", 2), RecurrentState("all", 2)),
    (FullAttention(), SlidingWindow(4), RecurrentState("align", 2)),
    (RecurrentState("none"),),
    (FullAttention(), CrossAttention(2)),
)
RETRY_WINDOW_S = 1.5
PEER_TIMEOUT_S = 0.8
MAX_MODEL_LEN = 40
MAX_WORKER_DEATHS = 3  # more than those (MAX_CRASHES) after which a request that was alone in its worker is refused
MAX_DEATHS = 4  # one less than those (runtime/process/deaths.py) after which a request is given up
MAX_CUTS = 1  # each end of a link may lose the other, and a request's attempt with it


class Scenario(Struct, frozen=True, kw_only=True):
    seed: int
    shape: Shape
    tp_size: int
    pp_size: int
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
    max_drafts: int = 0  # of the workers: with some, rows get none, one or several tokens a step
    kv_specs: tuple[KVSpec, ...] = ()  # of their groups of layers
    num_prefill_ranks: int = 0  # the first ranks; 0: none has a role

    @property
    def num_hosts(self) -> int:
        return 1 if self.shape in (Shape.PLAIN, Shape.GROUP, Shape.LOCKSTEP) else 2

    @property
    def group_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def num_workers(self) -> int:
        return self.num_ranks * self.group_size

    @property
    def identities(self) -> list[Identity]:
        counts = {
            Role.WORKER: self.num_workers,
            Role.COORDINATOR: 1,
            Role.SCHEDULER: self.num_ranks,
            Role.DETOKENIZER: self.num_detokenizers,
            Role.FRONTEND: self.num_frontends,
        }
        return [Identity(role, index) for role, count in counts.items() for index in range(count)]

    def host_of(self, identity: Identity) -> int:
        """0 is the head."""
        far = {
            Shape.HOSTS: {Role.SCHEDULER: 1, Role.WORKER: self.group_size},
            Shape.FAR_HOSTS: {Role.SCHEDULER: 0, Role.WORKER: 0},
            Shape.SPANNING: {Role.SCHEDULER: self.num_ranks, Role.WORKER: self.num_workers // 2},
        }.get(self.shape, {})
        first = far.get(identity.role) if identity.role is not Role.SUPERVISOR else 1
        return int(self.num_hosts > 1 and first is not None and identity.index >= first)

    @property
    def supervisors(self) -> list[Identity]:
        return [Identity(Role.SUPERVISOR, placement.node_index(config)) for config in configs_of(self)]

    def linked(self, one: Identity, other: Identity) -> bool:
        """Whether these two should have a session when all is well."""
        if one.role is other.role is Role.SCHEDULER:
            return self.num_prefill_ranks > 0 and one.index < other.index
        if (one.role, other.role) not in LINKS:
            return False
        if other.role is Role.SUPERVISOR:
            return self.host_of(one) == self.host_of(other)
        return one.index == other.index // self.group_size if other.role is Role.WORKER else True


LINKS = (
    (Role.FRONTEND, Role.DETOKENIZER),
    (Role.FRONTEND, Role.COORDINATOR),
    (Role.DETOKENIZER, Role.COORDINATOR),
    (Role.DETOKENIZER, Role.SCHEDULER),
    (Role.SCHEDULER, Role.COORDINATOR),
    (Role.SCHEDULER, Role.WORKER),
    (Role.WORKER, Role.COORDINATOR),
    *((role, Role.SUPERVISOR) for role in Role if role is not Role.SUPERVISOR),
)


# --- drawing ---


def make(seed: int, kinds: tuple[Kind, ...] = (), shape: Shape | None = None) -> Scenario:
    """Where `kinds` does not say, some histories have one kind of fault and some have all."""
    shape = shape or SHAPES[seed % len(SHAPES)]
    dice = random.Random(seed)
    draw = dice.random
    possible = _possible(shape)
    kinds = kinds or (possible if draw() < 0.6 else (dice.choice(possible),))
    tp_size, pp_size = dice.choice(_sizes(shape))
    plain = Scenario(
        seed=seed,
        shape=shape,
        tp_size=tp_size,
        pp_size=pp_size,
        num_frontends=1 + (draw() < 0.25),
        num_detokenizers=1 + (draw() < 0.4),
        num_ranks=1 + (shape in (Shape.HOSTS, Shape.LOCKSTEP) or (shape is not Shape.SPANNING and draw() < 0.4)),
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
    if shape is Shape.LOCKSTEP:
        plain = replace(plain, num_ranks=random.Random(f"ranks {seed}").choice((2, 4)))
    asks = tuple(_ask(dice, number, plain.num_frontends) for number in range(dice.randint(1, 4)))
    faults = tuple(
        _faults(dice, plain, kinds, dice.choice((0, 1, 2, 2, 3, 3, 4, 5, 6)) if len(kinds) > 1 else dice.randint(1, 3))
    )
    again = random.Random(f"again {seed}")  # dice of its own: seeds keep the rest of their histories
    asks = tuple(replace(ask, retries=again.random() < 0.4) for ask in asks)
    pools = random.Random(f"pools {seed}")
    asks = tuple(_pooling(pools, ask) if pools.random() < 0.2 else ask for ask in asks)
    drafts = random.Random(f"drafts {seed}")
    specs = random.Random(f"groups {seed}").choice(GROUPS)
    states = random.Random(f"states {seed}")
    if states.random() < 0.2:
        specs = states.choice(STATES)
    if Kind.UPDATE in kinds:  # what ends an answer earlier would hang on its weights
        asks = tuple(replace(ask, pool=None, stop_ids=(), stops=()) for ask in asks)
    made = replace(plain, asks=asks, faults=faults, max_drafts=drafts.choice((0, 0, 1, 2, 4)), kv_specs=specs)
    return with_roles(made) if random.Random(f"roles {seed}").random() < 0.4 else made


def with_roles(scenario: Scenario) -> Scenario:
    """The same with ranks for prompts and ranks that decode, where it can have them."""
    if not (scenario.prefix_caching and scenario.num_ranks > 1 and scenario.shape in (Shape.PLAIN, Shape.GROUP)):
        return scenario
    dice = random.Random(f"roles {scenario.seed}")
    if dice.random() < 0.5:
        return replace(scenario, num_prefill_ranks=1)
    change = Fault(dice.randrange(300), Kind.ROLES, HEAD, None, dice.choice((0.01, 0.2, 2.5)) * dice.random())
    faults = tuple(sorted((*scenario.faults, change), key=lambda fault: fault.at_frame))
    return replace(scenario, num_prefill_ranks=1, num_ranks=3, faults=faults)


def _possible(shape: Shape) -> tuple[Kind, ...]:
    """Faults; those that are the shape's own come more often."""
    kinds = FAULTS
    if shape in (Shape.GROUP, Shape.SPANNING):
        kinds = (*kinds, Kind.KILL_WORKER, Kind.KILL_SENDING)
    if shape is Shape.LOCKSTEP:  # the number of its ranks is fixed
        kinds = (*(kind for kind in kinds if kind is not Kind.SCALE), Kind.KILL_WORKER, Kind.KILL_SCHEDULER)
    if shape not in (Shape.PLAIN, Shape.GROUP, Shape.LOCKSTEP):
        kinds = (*kinds, *CUTS, *CUTS)
    return kinds


def _sizes(shape: Shape) -> tuple[tuple[int, int], ...]:
    """Of tensor and pipeline parallelism."""
    if shape in (Shape.PLAIN, Shape.LOCKSTEP, Shape.FAR_HOSTS):
        return ((1, 1),)
    return ((1, 1), (1, 1), (2, 1)) if shape is Shape.HOSTS else ((2, 1), (2, 1), (1, 2), (2, 2))


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
        leave_after=dice.randint(0, max_tokens) if draw() < 0.3 else -1,
    )


def _pooling(dice: random.Random, ask: Ask) -> Ask:
    """The same for a vector."""
    leave_after = 0 if ask.leave_after >= 0 else -1
    return replace(ask, pool=dice.choice(tuple(PoolKind)), stop_ids=(), stops=(), leave_after=leave_after)


def _faults(dice: random.Random, plain: Scenario, kinds: tuple[Kind, ...], count: int) -> list[Fault]:
    """The first anywhere; each other one often soon after the one before."""
    found: list[Fault] = []
    at = 0
    for _ in range(count):
        at += dice.randrange(20) if found and dice.random() < 0.6 else dice.randrange(300)
        allowed = [kind for kind in kinds if _may(kind, found)]
        deadly = [kind for kind in allowed if kind in KILLS]
        if not allowed:
            break
        kind = dice.choice(deadly if deadly and dice.random() < 0.5 else allowed)
        found.append(_fault(dice, plain, at, kind))
    return found


def _may(kind: Kind, found: list[Fault]) -> bool:
    """Whether one more is bearable: a request that never gets on is given up, and rightly so."""
    num_cuts = sum(fault.kind in CUTS for fault in found)
    num_deaths = sum(fault.kind in KILLS or fault.kind is Kind.LOSE_LINK for fault in found) + 2 * num_cuts
    num_workers = sum(fault.kind is Kind.KILL_WORKER for fault in found) + 2 * num_cuts
    if kind in CUTS:
        return num_cuts < MAX_CUTS and num_deaths + 2 <= MAX_DEATHS and num_workers + 2 <= MAX_WORKER_DEATHS
    if kind is Kind.KILL_WORKER and num_workers >= MAX_WORKER_DEATHS:
        return False
    return (kind not in KILLS and kind is not Kind.LOSE_LINK) or num_deaths < MAX_DEATHS


def _fault(dice: random.Random, plain: Scenario, at: int, kind: Kind) -> Fault:
    seconds = dice.choice((0.01, 0.2, 2.5)) * dice.random()
    identities = plain.identities
    if kind in KILLS:
        who = dice.choice([one for one in identities if one.role is KILLS[kind]])
        return Fault(at, kind, who, None, dice.random() ** 4 * 2.0)
    if kind is Kind.SCALE or kind in OPERATIONS:
        return Fault(at, kind, HEAD, None, seconds)
    if kind is Kind.PAUSE:
        return Fault(at, kind, dice.choice(identities), None, seconds)
    if kind in CUTS:
        who, peer = dice.sample(plain.supervisors, 2)
        return Fault(at, kind, who, peer, dice.choice((0.1, 1.0, 3.0)) * dice.random())
    if kind is Kind.LOSE_LINK:
        ends = [dice.choice([one for one in identities if one.role is role]) for role in ENDS]
        dice.shuffle(ends)
        return Fault(at, kind, ends[0], ends[1])
    everyone = [*identities, *plain.supervisors]
    linked = plain.linked
    who, peer = dice.choice([(a, b) for a in everyone for b in everyone if linked(a, b) or linked(b, a)])
    return Fault(at, kind, who, peer, seconds)


# --- its configuration ---


_SPEC = spec_of(vocab_size=VOCAB, max_position_embeddings=MAX_MODEL_LEN)


def configs_of(scenario: Scenario) -> list[cfg.MeshConfig]:
    """For each host."""
    return [_config_of(scenario, host) for host in range(scenario.num_hosts)]


def _config_of(scenario: Scenario, host: int) -> cfg.MeshConfig:
    resolved = resolved_of(
        _SPEC, device="fake", max_num_seqs=scenario.max_num_seqs, max_num_batched_tokens=scenario.max_num_batched_tokens
    )
    config = cfg.MeshConfig(
        cache=cfg.CacheConfig(enable_prefix_caching=scenario.prefix_caching),
        scheduler=cfg.SchedulerConfig(async_depth=scenario.async_depth),
        parallel=_parallel_of(scenario, host),
        server=cfg.ServerConfig(detokenizers=scenario.num_detokenizers, retry_window=RETRY_WINDOW_S),
        run=cfg.RunConfig(run_dir=f"/sim/{host}"),
        kv_transfer=cfg.KVTransferConfig(num_prefill_ranks=scenario.num_prefill_ranks),
        worker=cfg.WorkerConfig(fake_lockstep=scenario.shape is Shape.LOCKSTEP),
        resolved=resolved,
    )
    return config if scenario.num_hosts == 1 else _with_node(config, host)


def _parallel_of(scenario: Scenario, host: int) -> cfg.ParallelConfig:
    parallel = cfg.ParallelConfig(
        data_parallel_size=scenario.num_ranks,
        tensor_parallel_size=scenario.tp_size,
        pipeline_parallel_size=scenario.pp_size,
    )
    if scenario.shape is Shape.SPANNING:
        return replace(parallel, nnodes=2, node_rank=host)
    if scenario.num_hosts == 1:
        return parallel
    near = int(scenario.shape is Shape.HOSTS)
    if host:
        return replace(parallel, data_parallel_start_rank=near)
    return replace(parallel, data_parallel_size_local=near)


def _with_node(config: cfg.MeshConfig, host: int) -> cfg.MeshConfig:
    """As addresses.with_node makes it, which looks at this machine's interfaces."""
    head = tcp.join(address_of(0), HEAD_PORT)
    network = cfg.NetworkConfig(
        listen="" if host else head, join=head if host else "", headless=bool(host), peer_timeout=PEER_TIMEOUT_S
    )
    config = replace(config, network=network)
    ranks, workers = placement.local_ranks(config)
    node = cfg.Node(
        index=placement.node_index(config),
        id=f"node {host}",
        address=address_of(host),
        head=network.join,
        ranks=(ranks.start, len(ranks)),
        workers=(workers.start, len(workers)),
    )
    return replace(config, node=node)
