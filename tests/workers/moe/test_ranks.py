"""Tensor-parallel ranks that have whole experts, alone and with data-parallel ranks beside them, give the logits of the whole model."""

from pathlib import Path

import pytest
import torch
from expert_ranks import connected, together
from sharded_models import Threads, communicators, logits_of
from small_models import CPU, EXPERTS, SHARED, SMALL, caches, load, resolved, run
from torch import Tensor

from meshlm.protocol.config import ParallelConfig
from meshlm.protocol.config.experts import EPLBConfig
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.moe.placement.balancer import Balancer, Experts
from meshlm.workers.weights.load import load_model

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2-MoE: with experts that every token goes to, and a layer without any."""
    import transformers

    path: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    extra = EXPERTS | SHARED | {"num_experts": 8, "mlp_only_layers": [1]}
    config = transformers.Qwen2MoeConfig(**{**SMALL, "intermediate_size": 96, **extra})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return path


def shards(dp: int, tp: int) -> list[list[Shard]]:
    parallel = ParallelConfig(data_parallel_size=dp, tensor_parallel_size=tp)
    return [[Shard.of_worker(parallel, rank * tp + at, expert_parallel=True) for at in range(tp)] for rank in range(dp)]


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (2, 1)])
def test_logits_of_the_whole(dp: int, tp: int, folder: Path, tmp_path: Path) -> None:
    tokens = [torch.randint(0, 211, (37 - 20 * rank,)).tolist() for rank in range(dp)]
    whole = load(folder)
    wanted = [run(whole, caches(whole.spec, 24), [(of_rank, 0, TABLE)]) for of_rank in tokens]
    found = resolved(folder)
    with torch.inference_mode():
        models = [[load_model(found, CPU, 0, lambda done, total: None, s) for s in rank] for rank in shards(dp, tp)]
    assert sorted(m.local.moe.local_experts for rank in models for m in rank if m.local.moe) == [  # type: ignore[type-var]
        (first, first + 8 // (dp * tp)) for first in range(0, 8, 8 // (dp * tp))
    ]
    comms = [communicators(of_rank) for of_rank in shards(dp, tp)]
    groups = [[ExpertGroup(rank, dp, str(at), CPU) for at in range(tp)] for rank in range(dp)]

    def one(rank: int, model: Decoder, comm: Threads, group: ExpertGroup) -> Tensor:
        model.join(comm)
        if dp > 1:
            group.connect(str(tmp_path), 1)  # type: ignore[arg-type]
            group.num_tokens = 37
            model.share_experts(group, "allgather_reducescatter")
        return logits_of(model, comm, tokens[rank])

    everyone = [(rank, models[rank][at], comms[rank][at], groups[rank][at]) for rank in range(dp) for at in range(tp)]
    for (rank, *_), logits in zip(everyone, together(everyone, lambda given: one(*given)), strict=True):
        torch.testing.assert_close(logits, wanted[rank], atol=2e-5, rtol=1e-4)
    for members in groups:
        for group in members:
            group.close()


def test_an_idle_rank_computes_for_the_others(folder: Path, tmp_path: Path) -> None:
    found = resolved(folder)
    with torch.inference_mode():
        models = [load_model(found, CPU, 0, lambda done, total: None, shard) for (shard,) in shards(2, 1)]
    whole, tokens = load(folder), list(range(3, 20))
    wanted = run(whole, caches(whole.spec, 24), [(tokens, 0, TABLE)])
    with connected(tmp_path, 2) as groups:

        def one(group: ExpertGroup) -> Tensor | None:
            model = models[group.rank]
            group.num_tokens = len(tokens)
            model.share_experts(group, "all_to_all")
            with torch.inference_mode():
                if group.rank:
                    return logits_of(model, communicators([model.shard])[0], tokens)
                model.idle()
                return None

        nothing, logits = together(groups, one)
    assert nothing is None
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-4)


def test_experts_move_between_the_workers_of_a_tensor_parallel_rank(folder: Path, tmp_path: Path) -> None:
    """Of two by two: logits before and after are those of the whole, and each pair moves its own."""
    tokens, whole, found = [list(range(3, 40)), list(range(50, 80))], load(folder), resolved(folder)
    wanted = [run(whole, caches(whole.spec, 24), [(of_rank, 0, TABLE)]) for of_rank in tokens]
    parallel = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    everyone = [Shard.of_worker(parallel, worker, expert_parallel=True, num_redundant=4) for worker in range(4)]
    comms = [comm for rank in (everyone[:2], everyone[2:]) for comm in communicators(rank)]
    config = EPLBConfig(window_size=1, step_interval=1, num_redundant_experts=4)

    def one(worker: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        shard, group = everyone[worker], ExpertGroup(worker // 2, 2, str(worker % 2), CPU)
        with torch.inference_mode():
            model = load_model(found, CPU, 0, lambda done, total: None, shard)
            model.join(comms[worker])
            group.connect(str(tmp_path), 1)  # type: ignore[arg-type]
            group.num_tokens = 37
            mixtures = model.mixtures()
            weights = [list(mixture.experts.parameters()) for mixture in mixtures]
            balancer = Balancer(config, group, Experts.of(mixtures[0].moe, shard, group), weights, lambda: None)
            for mixture, replicas in zip(mixtures, balancer.replicas, strict=True):
                mixture.replicas = replicas
            model.share_experts(group, "all_to_all", slots=True)
            balancer.begin()
            first = [list(slots) for slots in balancer.slots]
            balancer.before_step()
            before = logits_of(model, comms[worker], tokens[worker // 2])
            balancer.before_step()
            assert balancer.slots != first
            after = logits_of(model, comms[worker], tokens[worker // 2])
            group.close()
            return before, after, balancer.slots

    results = together(list(range(4)), one)
    for worker, (before, after, slots) in enumerate(results):
        torch.testing.assert_close(before, wanted[worker // 2], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(after, wanted[worker // 2], atol=2e-5, rtol=1e-4)
        assert slots == results[worker % 2][2]
