"""What a history is made of: a mesh, its clients, its faults. `make` draws one from a seed."""

import os
import random
from enum import Enum

from clients import Ask
from mock_worker import VOCAB
from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol import config as cfg
from meshlm.protocol.ids import Identity, Role
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.mesh import SUPERVISOR

BLOCK_SIZE = 2
RETRY_WINDOW_S = 3.0
MAX_MODEL_LEN = 40
MAX_WORKER_DEATHS = 3  # one less than those (MAX_CRASHES) after which a scheduler gives up what it computed then
MAX_DEATHS = 4  # one less than the attempts (MAX_ATTEMPTS) after which a request is given up


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
    SCALE = "all ranks but the first are to be removed, and come back"
    EARLY_WORD = "a peer is heard before App.start has run"


# What the product cannot take yet, and why. An entry goes when its bug is mended; MESHLM_SIM_ALL=1 ignores them all.
OFF: dict[Kind, str] = {}
if os.environ.get("MESHLM_SIM_ALL"):
    OFF.clear()

KILLS = {
    Kind.KILL_FRONTEND: Role.FRONTEND,
    Kind.KILL_DETOKENIZER: Role.DETOKENIZER,
    Kind.KILL_COORDINATOR: Role.COORDINATOR,
    Kind.KILL_SCHEDULER: Role.SCHEDULER,
    Kind.KILL_WORKER: Role.WORKER,
}
FAULTS = (*KILLS, Kind.BREAK, Kind.SLOW, Kind.PAUSE, Kind.SCALE)  # the others are always there, unless they are OFF


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
    *((role, Role.SUPERVISOR) for role in Role if role is not Role.SUPERVISOR),
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
    faults = tuple(
        _faults(
            dice,
            plain.identities,
            kinds,
            dice.choice((0, 1, 2, 2, 3, 3, 4, 5, 6)) if len(kinds) > 1 else dice.randint(1, 3),
        )
    )
    again = random.Random(f"again {seed}")  # dice of its own: seeds keep the rest of their histories
    asks = tuple(replace(ask, retries=again.random() < 0.4) for ask in asks)
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
        leave_after=dice.randint(0, max_tokens) if draw() < 0.3 else -1,
    )


def _faults(dice: random.Random, identities: list[Identity], kinds: tuple[Kind, ...], count: int) -> list[Fault]:
    """The first anywhere; each other one often soon after the one before."""
    found: list[Fault] = []
    at = 0
    for _ in range(count):
        at += dice.randrange(20) if found and dice.random() < 0.6 else dice.randrange(300)
        may_kill = sum(fault.kind in KILLS for fault in found) < MAX_DEATHS
        allowed = [kind for kind in kinds if may_kill or kind not in KILLS]
        if sum(fault.kind is Kind.KILL_WORKER for fault in found) == MAX_WORKER_DEATHS:
            allowed = [kind for kind in allowed if kind is not Kind.KILL_WORKER]
        deadly = [kind for kind in allowed if kind in KILLS]
        if not allowed:
            break
        kind = dice.choice(deadly if deadly and dice.random() < 0.5 else allowed)
        seconds = dice.choice((0.01, 0.2, 2.5)) * dice.random()
        if kind in KILLS:
            candidates = [one for one in identities if one.role is KILLS[kind]]
            who = dice.choice(candidates)
            found.append(Fault(at, kind, who, None, dice.random() ** 4 * 2.0))
        elif kind is Kind.SCALE:
            found.append(Fault(at, kind, SUPERVISOR, None, seconds))
        elif kind is Kind.PAUSE:
            found.append(Fault(at, kind, dice.choice(identities), None, seconds))
        else:
            everyone = [*identities, SUPERVISOR]
            who, peer = dice.choice([(a, b) for a in everyone for b in everyone if linked(a, b) or linked(b, a)])
            found.append(Fault(at, kind, who, peer, seconds))
    return found


# --- its configuration ---


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
        server=cfg.ServerConfig(detokenizers=scenario.num_detokenizers, retry_window=RETRY_WINDOW_S),
        run=cfg.RunConfig(run_dir="/sim"),
        resolved=resolved,
    )
