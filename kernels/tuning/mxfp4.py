"""A layer of experts with MXFP4 weights for the tuner: kernels/mxfp4_few, beside what kernels/mxfp4_experts does with as many rows, and
that kernel's tiles of many rows."""

from functools import partial

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import Layer
from meshlm.kernels.mxfp4_experts import plan
from meshlm.kernels.mxfp4_experts.layout import chunks_of
from meshlm.kernels.mxfp4_experts.runs import Runs
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Run, Setting, Ways

OPS = (plan.OP, plan.MANY_OP)
SIZES = {plan.OP: [1, 64, 16, 4, 256], plan.MANY_OP: [8192, 2048, 16384]}
ALL_SIZES = {plan.OP: [*SIZES[plan.OP], 2, 8, 32, 128, 512], plan.MANY_OP: [*SIZES[plan.MANY_OP], 1024, 4096]}
ROOM = 0.5  # of the memory that is free: for random weights of one layer


def sizes(op: str, layer: Layer, device: torch.device, *, full: bool) -> list[int]:
    """Numbers of rows to measure; none where there is no room for another layer's weights."""
    if layer.topk > layer.experts:  # of a rank: how many of a token's experts are its own is not known
        return []
    weights = layer.experts * 68 * (2 * layer.wide * chunks_of(layer.hidden) + layer.hidden * chunks_of(layer.wide))
    if device.type == "cuda" and weights > ROOM * torch.cuda.mem_get_info(device)[0]:
        return []
    found = (ALL_SIZES if full else SIZES)[op]
    return [rows for rows in found if op == plan.OP or rows * layer.topk > plan.MANY * layer.experts]


def ways(case: Case, setting: Setting, most: int) -> Ways:
    """The plan that is taken without a measurement, and no more than `most` others. Runs have weights of their own."""
    layer = Layer(*case.key)
    runs, usual = Runs(layer, case.rows, setting.device, setting.dtype), plan.usual_plan(case.rows, layer)
    plans = {PLAIN: usual}
    if case.op == plan.MANY_OP:
        plans |= {numbers: plan.decoded_many(numbers) for numbers in plan.candidates_of_many()}
    else:
        plans |= {numbers: plan.decoded(numbers) for numbers in plan.candidates(case.rows, layer)[:most]}
    found: dict[Config, Run] = {numbers: partial(_run, runs, chosen) for numbers, chosen in plans.items()}
    return Ways([torch.empty(0, device=setting.device)], found)


def _run(runs: Runs, chosen: plan.Plan, nothing: Tensor) -> Tensor:
    return runs.of(chosen)
