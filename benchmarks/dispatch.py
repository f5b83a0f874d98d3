"""Microseconds of dispatch and combine between the ranks of one host, by each --all2all-backend, and of NCCL's all-to-all.

    python -P benchmarks/dispatch.py --ranks 2 --out benchmarks/results/dispatch_h200.json

One process a GPU. A round is dispatch and combine of one layer without experts, in a CUDA graph of several rounds. `nccl` is two
all-to-alls of as many rows, the bare collectives; `limit_us` what one direction of NVLink needs for the bytes that leave a rank.
`peer_memory` writes each row by kernels, `peer_memory, copied` all of them by copy engines.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec, MoESpec
from meshlm.protocol.wire.ids import Epoch
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import StepAborted
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.moe.dispatch.peer_memory import PeerMemory
from meshlm.workers.moe.parts import Dispatcher, Routing, WeightAndReduce
from meshlm.workers.moe.registry import group_dispatch

HIDDEN, EXPERTS, TOPK = 2048, 128, 8  # Qwen3-30B-A3B
TOKENS = (1, 32, 128, 512, 1024, 4096)
BACKENDS = ("allgather_reducescatter", "all_to_all", "peer_memory", "peer_memory, copied")
ROUNDS, REPLAYS = 10, 20
NVLINK = 450e9  # bytes a second in one direction


def timed(one: Callable[[], object]) -> float:
    """Microseconds of a round."""
    for _ in range(3):
        one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(ROUNDS):
            one()
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / ROUNDS / REPLAYS


def one_round(way: Dispatcher, x: Tensor, routing: Routing) -> Tensor:
    given = way.prepare_async(x, routing, lambda x: (x, None))()
    return way.combine_async(given.x, given, routing, WeightAndReduce.DONE)().value


def bare(group: ExpertGroup, sent: Tensor) -> Tensor:
    return group.all_to_all(group.all_to_all(sent))


def measure(rank: int, size: int, folder: str, answers: Any) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    found: list[dict[str, Any]] = []
    moe, shard = (
        MoESpec(num_experts=EXPERTS, num_experts_per_tok=TOPK, moe_intermediate_size=768),
        Shard(ep_rank=rank, ep_size=size),
    )
    sizes: dict[str, Any] = {
        "vocab_size": 1,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    spec = ModelSpec(architecture="", hidden_size=HIDDEN, head_dim=1, max_position_embeddings=1, moe=moe, **sizes)
    for epoch, backend in enumerate((*BACKENDS, "nccl"), 1):
        group = ExpertGroup(rank, size, "0", device)
        name = BACKENDS[0] if backend == "nccl" else backend
        if backend.startswith("peer_memory"):
            group.share_memory(max(TOKENS), spec, torch.bfloat16)
        way = group_dispatch(moe, shard, group, name.partition(",")[0])
        if isinstance(way, PeerMemory):
            way.copied = 0 if backend.endswith("copied") else max(TOKENS) + 1
            group.pause = (lambda: None) if backend.endswith("copied") else None  # as of halves, which have them copied
        try:
            group.connect(folder, Epoch(epoch))
        except (RuntimeError, StepAborted) as error:
            found.append({"backend": backend, "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        for tokens in TOKENS:
            generator = torch.Generator(device).manual_seed(rank)
            x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device, generator=generator)
            logits = torch.randn(tokens, EXPERTS, device=device, generator=generator)
            weights, experts = logits.softmax(1).topk(TOPK)
            routing = Routing(experts.int(), weights)
            group.num_tokens = tokens
            sent = x.repeat(size, 1)

            us = timed(partial(bare, group, sent) if backend == "nccl" else partial(one_round, way, x, routing))
            limit = 2 * tokens * HIDDEN * 2 * (size - 1) / NVLINK * 1e6
            line = {
                "backend": backend,
                "ranks": size,
                "tokens": tokens,
                "us": round_to(us),
                "limit_us": round_to(limit),
            }
            if backend != "nccl":
                # rows go to all members, or to those with their experts, and come back as often
                owners = torch.stack([experts // (EXPERTS // size) == one for one in range(size)]).any(2).sum(0)
                times = torch.full_like(owners, size) if backend == BACKENDS[0] else owners
                line["error"] = float((one_round(way, x, routing).float() - x.float() * times[:, None]).abs().max())
            found.append(line)
        group.close()
    answers.put((rank, found))


def round_to(us: float) -> float:
    return float(f"{us:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=measure, args=(n, given.ranks, folder, answers)) for n in range(given.ranks)]
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join()
    result = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": found[0]}
    for line in found[0]:
        print(json.dumps(line))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
