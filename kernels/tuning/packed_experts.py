"""A layer of experts with packed weights for the tuner: kernels/packed_experts/direct.py, beside what kernel.py does with as many
rows, and that kernel's tiles of many rows."""

from functools import partial

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import Layer
from meshlm.kernels.packed_experts import plan
from meshlm.kernels.packed_experts.layout import chunks_of
from meshlm.kernels.packed_experts.runs import Runs
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Key, Run, Setting, Ways

OPS = (plan.OP, plan.MANY_OP)
SIZES = {plan.OP: [1, 64, 16, 4, 256], plan.MANY_OP: [8192, 2048, 16384]}
ALL_SIZES = {plan.OP: [*SIZES[plan.OP], 2, 8, 32, 128, 512], plan.MANY_OP: [*SIZES[plan.MANY_OP], 1024, 4096]}
BYTES_OF_CHUNK = 136  # of 8 bits in groups of 64
ROOM = 0.5  # of the memory that is free: for random weights of one layer


def sizes(op: str, key: Key, device: torch.device, *, full: bool) -> list[int]:
    """Numbers of rows to measure; none where there is no room for another layer's weights."""
    layer = Layer(*key[:4])
    if layer.topk > layer.experts:  # of a rank: how many of a token's experts are its own is not known
        return []
    weights = (
        layer.experts
        * BYTES_OF_CHUNK
        * (2 * layer.wide * chunks_of(layer.hidden) + layer.hidden * chunks_of(layer.wide))
    )
    if device.type == "cuda" and weights > ROOM * torch.cuda.mem_get_info(device)[0]:
        return []
    found = (ALL_SIZES if full else SIZES)[op]
    return [rows for rows in found if op == plan.OP or rows * layer.topk > plan.MANY * layer.experts]


def ways(case: Case, setting: Setting, most: int) -> Ways:
    """The plan that is taken without a measurement, and no more than `most` others. Runs have weights of their own."""
    layer, kind = Layer(*case.key[:4]), str(case.key[4])
    runs = Runs(layer, case.rows, setting.device, setting.dtype, kind)
    usual = plan.usual_plan(case.rows, layer, kind)
    plans = {PLAIN: usual}
    if case.op == plan.MANY_OP:
        plans |= {numbers: plan.decoded_many(numbers) for numbers in plan.candidates_of_many()}
    else:
        plans |= {numbers: plan.decoded(numbers, kind) for numbers in plan.candidates(case.rows, layer, kind)[:most]}
    found: dict[Config, Run] = {numbers: partial(_run, runs, chosen) for numbers, chosen in plans.items()}
    return Ways([torch.empty(0, device=setting.device)], found)


def _run(runs: Runs, chosen: plan.Plan, nothing: Tensor) -> Tensor:
    return runs.of(chosen)
