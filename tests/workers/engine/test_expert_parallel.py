"""Engines that share experts give the tokens of one that has all of them: each its own requests, some idle, in prompts and decodes."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import tokenizers
import torch
from cpu_steps import LENGTH, OUTPUT, alone, new, step, tokens_of
from sharded_models import Threads
from small_models import EXPERTS, SMALL

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.lockstep import StepGroup
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Epoch, StepId
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.batch import StepInputs
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import SocketExchange, StepAborted
from meshlm.workers.distributed.membership import Membership
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine

LIMIT_S = 60
GREEDY = SamplingParams(temperature=0.0, seed=1)
PROMPTS = [[3 + (31 * n + 7 * i) % 200 for i in range(5 + 9 * n)] for n in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE with random weights."""
    import transformers

    path: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    extra = EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "num_experts": 8}
    config = transformers.Qwen3MoeConfig(**SMALL, **extra)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path / "tokenizer.json"))
    return path


def config_of(folder: Path, **settings: object) -> MeshConfig:
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "dtype": "float32", "cpu_threads": 1}
    values |= {"max_model_len": LENGTH, "max_num_seqs": 4, "kv_cache_memory": 1 << 24, **settings}
    return resolve.resolve(flags.build(values, None))


def engine_of(config: MeshConfig, worker: int = 0) -> ModelEngine:
    return make_engine(config, lambda *progress: None, WorkerPlacement.of(config, worker, Membership()))


@pytest.fixture(scope="module", autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    yield
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Of one rank with all experts, each token from a prompt that is computed anew."""
    engine = engine_of(config_of(folder))
    return [alone(engine, prompt, GREEDY) for prompt in PROMPTS]


def empty(engine: ModelEngine) -> list[int]:
    return tokens_of(engine.step(StepPlan(1, StepId(1), b"", b"", b"", b"", 0), 0).wait())


def serve(engine: ModelEngine, prompt: list[int] | None, pause: int) -> list[int]:
    """`pause` idle steps, the prompt in two chunks, then decodes and idle steps; all ranks take as many steps."""
    found: list[int] = []
    for nth in range(OUTPUT + 1 + 3):
        at = nth - pause
        if prompt is None or not 0 <= at <= OUTPUT:
            assert empty(engine) == []
        elif at == 0:
            step(engine, [(0, 0, 3, False)], [new(0, prompt, GREEDY)])
        elif at == 1:
            found += tokens_of(step(engine, [(0, 3, len(prompt) - 3, True)], []))
        else:
            found += tokens_of(step(engine, [(0, len(prompt) + len(found) - 1, 1, True)], []))
    return found


def all_at_once(works: Sequence[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        return [future.result(LIMIT_S) for future in futures]


def join(engines: list[ModelEngine], folder: Path, epoch: int) -> None:
    group = StepGroup(Epoch(epoch), len(engines))
    for engine in engines:
        engine.reset()
    exchanges = [SocketExchange(str(folder), group, member) for member in range(len(engines))]
    all_at_once([partial(e.join, x) for e, x in zip(engines, exchanges, strict=True)])


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all_to_all"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_experts_give_the_tokens_of_one(
    size: int, backend: str, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    settings = {"data_parallel_size": size, "enable_expert_parallel": True, "all2all_backend": backend}
    config = config_of(folder, **settings)
    engines = [engine_of(config, rank) for rank in range(size)]
    weights = [engine.model.layers[0].mlp.experts.down.weight for engine in engines]  # type: ignore[union-attr]
    assert {len(weight) for weight in weights} == {8 // size}, "each rank has a part of the experts"  # type: ignore[arg-type]
    try:
        join(engines, tmp_path, 1)
        given = [PROMPTS[rank] if rank != 1 else None for rank in range(size)]  # one has nothing to do all the time
        works = [
            partial(serve, engine, prompt, rank % 3)
            for rank, (engine, prompt) in enumerate(zip(engines, given, strict=True))
        ]
        wanted = [[] if prompt is None else expected[rank] for rank, prompt in enumerate(given)]
        assert all_at_once(works) == wanted
        engines[0].join(None)  # it is gone: none of the others waits for it
        for engine in engines[1:]:
            with pytest.raises(StepAborted):
                step(engine, [(0, 0, 4, False)], [new(0, PROMPTS[0], GREEDY)])
        join(engines, tmp_path, 2)
        assert all_at_once(works) == wanted
    finally:
        for engine in engines:
            engine.join(None)


def test_nobody_computes_a_step_without_tokens(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without any takes part where another has some."""
    config = config_of(folder, data_parallel_size=2, enable_expert_parallel=True)
    engines = [engine_of(config, rank) for rank in range(2)]
    idle: list[int] = []

    def noted(rank: int, take_part: Callable[[], None]) -> None:
        idle.append(rank)
        take_part()

    for rank, engine in enumerate(engines):
        monkeypatch.setattr(engine.model, "idle", partial(noted, rank, engine.model.idle))
    try:
        join(engines, tmp_path, 1)
        all_at_once([partial(empty, engine) for engine in engines])
        assert idle == []
        prompt = partial(step, engines[0], [(0, 0, 3, False)], [new(0, [5, 6, 7], GREEDY)])
        all_at_once([prompt, partial(empty, engines[1])])
        assert idle == [1]
    finally:
        all_at_once([partial(engine.join, None) for engine in engines])


def check_weights(engine: ModelEngine, whole: ModelEngine, rank: int, size: int) -> None:
    """Each slot holds the weights of the expert that the balancer says."""
    assert engine.balancer is not None
    pairs = zip(engine.model.mixtures(), whole.model.mixtures(), strict=True)
    for (own, of_whole), slots in zip(pairs, engine.balancer.slots, strict=True):
        each = len(slots) // size
        for mine, every in zip(own.experts.parameters(), of_whole.experts.parameters(), strict=True):
            assert torch.equal(mine, every[slots[rank * each : (rank + 1) * each]])


@pytest.mark.parametrize(
    ("settings", "redundant"),
    [({}, 2), ({"all2all_backend": "all_to_all"}, 8), ({"enable_dbo": True, "dbo_decode_token_threshold": 2}, 0)],
)
def test_experts_that_move_give_the_same_tokens(
    settings: dict[str, object], redundant: int, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    eplb = json.dumps({"window_size": 3, "step_interval": 2, "num_redundant_experts": redundant})
    settings |= {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": eplb}
    config, whole = config_of(folder, dbo_prefill_token_threshold=2, **settings), engine_of(config_of(folder))
    engines = [engine_of(config, rank) for rank in range(2)]
    balancers = [engine.balancer for engine in engines if engine.balancer is not None]
    first = [list(slots) for slots in balancers[0].slots]
    assert {len(slots) for slots in first} == {8 + redundant}
    try:
        join(engines, tmp_path, 1)
        works = [partial(serve, engine, prompt, 1) for engine, prompt in zip(engines, PROMPTS[2:], strict=True)]
        for epoch in (2, 3):
            assert all_at_once(works) == expected[2:]
            assert balancers[0].slots == balancers[1].slots != first
            for rank, engine in enumerate(engines):
                check_weights(engine, whole, rank, 2)
            join(engines, tmp_path, epoch)
            assert balancers[0].slots != first, "a group that meets anew goes on where it was"
        engines[1].join(None)
        engines[1] = engine_of(config, 1)  # it was killed, and has read its weights anew
        join(engines, tmp_path, 4)
        assert balancers[0].slots == first
        for rank, engine in enumerate(engines):
            check_weights(engine, whole, rank, 2)
        works[1] = partial(serve, engines[1], PROMPTS[3], 1)
        assert all_at_once(works) == expected[2:]
    finally:
        for engine in engines:
            engine.join(None)


class Stage(WorkerPlacement):
    """A tensor-parallel rank in a thread."""

    def __init__(self, rank: int, size: int, redundant: int, folder: Path) -> None:
        super().__init__(Shard(rank, size, ep_rank=rank, ep_size=size, redundant_experts=redundant // size))
        self._folder = folder

    def connect(self, device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Threads:
        return self.comm

    comm: Threads

    def stage(self, device: torch.device) -> ExpertGroup:
        group = ExpertGroup(self.shard.tp_rank, self.shard.tp_size, "stage", device)
        group.connect(str(self._folder), Epoch(0))
        return group


@pytest.mark.parametrize("redundant", [0, 2, 8])
def test_experts_that_move_between_tensor_parallel_ranks_give_the_same_tokens(
    redundant: int, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """All have the same rows, and each row goes to one replica of its experts."""
    eplb = json.dumps({"window_size": 3, "step_interval": 2, "num_redundant_experts": redundant})
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": eplb}
    config, whole = config_of(folder, **settings), engine_of(config_of(folder))
    placements, tables, barriers = (
        [Stage(rank, 2, redundant, tmp_path) for rank in range(2)],
        {0: [None, None]},
        threads(2),
    )
    for placement in placements:
        placement.comm = Threads(placement.shard, tables, barriers)
    made = all_at_once([partial(make_engine, config, lambda *progress: None, placement) for placement in placements])
    engines = [engine for engine in made if isinstance(engine, ModelEngine)]
    balancers = [engine.balancer for engine in engines if engine.balancer is not None]
    first = [list(slots) for slots in balancers[0].slots]
    assert {len(slots) for slots in first} == {8 + redundant}
    found = all_at_once([partial(told, engine, PROMPTS[3]) for engine in engines])
    assert found == [expected[3]] * 2
    assert balancers[0].slots == balancers[1].slots != first
    for rank, engine in enumerate(engines):
        check_weights(engine, whole, rank, 2)
        assert engine.rebalance().startswith("experts move between tensor-parallel ranks every step_interval steps")


def threads(size: int) -> list[threading.Barrier]:
    return [threading.Barrier(size)]


def told(engine: ModelEngine, prompt: list[int]) -> list[int]:
    """The prompt in two chunks, then decodes."""
    step(engine, [(0, 0, 3, False)], [new(0, prompt, GREEDY)])
    found = tokens_of(step(engine, [(0, 3, len(prompt) - 3, True)], []))
    while len(found) < OUTPUT:
        found += tokens_of(step(engine, [(0, len(prompt) + len(found) - 1, 1, True)], []))
    return found


def test_experts_move_when_all_ranks_were_asked_to(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """An operation comes to each rank before another step; what was counted until then says where to."""
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True}
    off = engine_of(config_of(folder))
    assert off.rebalance() == "start the server with --enable-eplb to move experts"
    config = config_of(folder, enable_eplb=True, **settings)
    engines = [engine_of(config, rank) for rank in range(2)]
    balancers = [engine.balancer for engine in engines if engine.balancer is not None]
    first = [list(slots) for slots in balancers[0].slots]
    join(engines, tmp_path, 1)
    works = [partial(serve, engine, prompt, 1) for engine, prompt in zip(engines, PROMPTS[2:], strict=True)]
    assert all_at_once(works) == expected[2:]
    assert engines[0].rebalance() == ""
    assert all_at_once([partial(empty, engine) for engine in engines]) == [[], []]
    assert balancers[0].slots == balancers[1].slots == first, "one of them does not know yet"
    assert engines[1].rebalance() == ""
    assert all_at_once([partial(empty, engine) for engine in engines]) == [[], []]
    moved = [list(slots) for slots in balancers[0].slots]
    assert balancers[1].slots == moved != first
    assert all_at_once(works) == expected[2:]
    assert balancers[0].slots == moved, "it was asked for once"
    for rank, engine in enumerate(engines):
        check_weights(engine, off, rank, 2)
        engine.join(None)


def decodes(engine: ModelEngine, prompts: list[list[int]], num_together: int) -> list[list[int]]:
    """Prompts of several requests in steps that hold them all, in chunks that steps cut anywhere; then decodes."""
    computed, found = [0] * len(prompts), [[] for _ in prompts]  # type: ignore[var-annotated]
    fresh = [new(row, prompt, GREEDY) for row, prompt in enumerate(prompts)]
    for _ in range(num_together):
        lens = [len(prompt) + len(tokens) for prompt, tokens in zip(prompts, found, strict=True)]
        counts = [min(7 + row, length - done) for row, (length, done) in enumerate(zip(lens, computed, strict=True))]
        order = [row for row, count in enumerate(counts) if count == 1]
        order += [row for row, count in enumerate(counts) if count > 1]
        parts = [(row, computed[row], counts[row], computed[row] + counts[row] == lens[row]) for row in order]
        tokens = tokens_of(step(engine, parts, fresh))
        fresh = []
        for row, start, count, samples in parts:
            computed[row] = start + count
            if samples:
                found[row].append(tokens.pop(0))
    return found


class Counting:
    """Keeps the size of each step's first half."""

    def __init__(self, of: Callable[[tuple[StepInputs, StepInputs]], torch.Tensor], cuts: list[int]) -> None:
        self._of, self._cuts = of, cuts

    def __call__(self, halves: tuple[StepInputs, StepInputs]) -> torch.Tensor:
        self._cuts.append(len(halves[0].input_ids))
        return self._of(halves)


def test_halves_of_steps_that_take_turns_give_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    """Prompts that the cut divides, decodes, and ranks with different numbers of tokens; off, where one has too few."""
    of_rank = [PROMPTS, [PROMPTS[2], PROMPTS[0], PROMPTS[1][:9], PROMPTS[3]]]
    found = []
    halved: list[list[int]] = []
    for dbo in (False, True):
        settings = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": dbo}
        config = config_of(folder, dbo_decode_token_threshold=4, dbo_prefill_token_threshold=8, **settings)
        engines = [engine_of(config, rank) for rank in range(2)]
        cuts: list[int] = []
        for engine in engines:
            engine.compute.by_turns = Counting(engine.compute.by_turns, cuts)  # type: ignore[method-assign]
        join(engines, tmp_path, 1 + dbo)
        works = [partial(decodes, e, p, 9) for e, p in zip(engines, of_rank, strict=True)]
        found.append(all_at_once(works))
        halved.append(cuts)
        for engine in engines:
            engine.join(None)
    assert found[0] == found[1]
    assert halved[0] == []
    assert len(halved[1]) > 8
    assert min(halved[1]) == 2, "decodes too"
    assert all(halved[1].count(cut) % 2 == 0 for cut in set(halved[1])), "both ranks or none"


def test_a_rank_that_fails_ends_a_step_in_halves(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half is left waiting for its turn, and the next group computes as ever."""
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}
    config = config_of(folder, dbo_prefill_token_threshold=4, **settings)
    engines = [engine_of(config, rank) for rank in range(2)]
    join(engines, tmp_path, 1)

    def one(engine: ModelEngine) -> str:
        try:
            step(engine, [(0, 0, 8, False)], [new(0, PROMPTS[1], GREEDY)])
        except (StepAborted, ZeroDivisionError) as error:
            return type(error).__name__
        return "done"

    with monkeypatch.context() as patched:
        patched.setattr(engines[0].compute, "by_turns", lambda halves: 1 // 0)
        assert all_at_once([partial(one, e) for e in engines]) == ["ZeroDivisionError", "StepAborted"]
    join(engines, tmp_path, 2)
    first, second = all_at_once([partial(decodes, e, PROMPTS[:2], 6) for e in engines])
    assert first == second
    for engine in engines:
        engine.join(None)
