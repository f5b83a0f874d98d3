"""Experts of a layer against what the GPU allows: bytes of the experts that are touched for few rows, matrix products for many.

    python -P benchmarks/moe.py CONFIG.json [--tp 1] [--ep 1] [--rows 1 8 64 8192] [--json FILE]

CONFIG.json is a checkpoint's. Times are of CUDA graphs: routing, the whole of the experts as a model calls them (TritonExperts), and
its share of the two limits, which are measured in the same run: what copies move, and a bfloat16 product of 8192 x 8192 x 8192.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import plan_for
from meshlm.kernels.grouped_gemm.tune import layer_of
from meshlm.kernels.measure import keep, microseconds
from meshlm.kernels.moe_routing.kernel import select_experts
from meshlm.kernels.moe_routing.reference import Rule
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.triton import TritonExperts
from meshlm.workers.moe.fused_moe import FusedMoE
from meshlm.workers.moe.parts import ExpertWeights, Routing, WeightAndReduce

ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
TURNS_BYTES = 400 << 20  # of weights that one measurement reads, at least


def copy_tb_s() -> float:
    """Bytes that a copy reads and writes."""
    data = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    other = torch.empty_like(data)
    return 2 * data.nbytes / microseconds(lambda: other.copy_(data), repeats=5) / 1e6


def matmul_tflop_s() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / microseconds(lambda: torch.mm(a, b), repeats=5) / 1e6


class Layer:
    """A layer's experts with random weights, and tokens that choose at random."""

    def __init__(self, config: dict[str, Any], tp: int, ep: int) -> None:
        self.sizes = layer_of(config, tp, ep)
        count, _, hidden, wide = self.sizes
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        gate_up, down = torch.randn(count, 2 * wide, hidden, **make), torch.randn(count, hidden, wide, **make)
        experts = TritonExperts(ExpertWeights(gate_up * 0.02, down * 0.02))
        self.fused = FusedMoE(NoDispatch(0, count, count, finishes=frozenset(WeightAndReduce)), experts)
        self.router = torch.randn(count, hidden, **make) * 0.02

    def measure(self, rows: int) -> dict[str, Any]:
        count, topk, hidden, wide = self.sizes
        touched_most = min(count, rows * topk)
        copies = max(1, min(16, TURNS_BYTES // (6 * touched_most * hidden * wide)))
        xs = [torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        choices = [self._choice(rows) for _ in range(copies)]

        def run() -> None:
            for x, choice in zip(xs, choices, strict=True):
                self.fused.forward(x, choice)

        us = microseconds(run, repeats=9) / copies
        touched = sum(len(set(choice.experts.flatten().tolist())) for choice in choices) / copies
        weights = 6 * touched * hidden * wide
        logits = torch.randn(rows, count, device="cuda")
        route = microseconds(lambda: select_experts(logits, Rule(topk, renormalise=True)), repeats=9)
        return {
            "rows": rows,
            "kind": plan_for(rows, self.sizes).kind,
            "us": round(us, 2),
            "touched": round(touched, 1),
            "tb_s": round(weights / us / 1e6, 2),
            "tflop_s": round(6 * rows * topk * hidden * wide / us / 1e6, 1),
            "select_us": round(route, 2),
        }

    def _choice(self, rows: int) -> Routing:
        count, topk = self.sizes[:2]
        scores: Tensor = torch.rand(rows, count, device="cuda")
        return Routing(scores.topk(topk, dim=1).indices.to(torch.int32), torch.rand(rows, topk, device="cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    limits = {"copy_tb_s": round(copy_tb_s(), 2), "matmul_tflop_s": round(matmul_tflop_s())}
    print(json.dumps(limits), flush=True)
    layer = Layer(json.loads(arguments.config.read_text()), arguments.tp, arguments.ep)
    results = []
    for rows in arguments.rows:
        found = layer.measure(rows)
        found["of_copies"] = round(found["tb_s"] / limits["copy_tb_s"], 3)
        found["of_matmul"] = round(found["tflop_s"] / limits["matmul_tflop_s"], 3)
        results.append(found)
        print(json.dumps(found), flush=True)
    keep(results, arguments.json, sizes=layer.sizes._asdict(), **limits)


if __name__ == "__main__":
    main()
