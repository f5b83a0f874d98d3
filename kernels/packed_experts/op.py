"""The record of experts with packed weights: a whole layer, with the order of rows and the sum over experts, by the plan that is taken
for so many rows. Tokens choose at random, each choice with other experts, so that weights come from memory."""

from itertools import product

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import Layer
from meshlm.kernels.grouped_gemm.reference import by_entry
from meshlm.kernels.op import Case, Launch, Op
from meshlm.kernels.packed_experts.layout import unpack
from meshlm.kernels.packed_experts.plan import plan_for
from meshlm.kernels.packed_experts.runs import Runs

QWEN3_30B_A3B, GPT_OSS_20B = (128, 8, 2048, 768), (32, 4, 2880, 2880)
MIXTRAL_8X7B, DEEPSEEK_V2_LITE = (8, 2, 4096, 14336), (64, 6, 2048, 1408)
AWQ, Q4_K, Q6_K, W8A16 = (
    "4 bits, groups of 128", "4 bits, groups of 32, minima", "6 bits, groups of 16", "8 bits, groups of 128",
)  # fmt: skip
ROWS = (1, 8, 16, 64, 256, 1024, 8192)


def _make(dtype: torch.dtype, device: torch.device, rows: int, sizes: tuple[int, int, int, int], kind: str) -> Launch:
    layer = Layer(*sizes)
    runs = Runs(layer, rows, device, dtype, kind)
    plan = plan_for(rows, layer, kind, direct=device.type == "cuda" and dtype == torch.bfloat16)

    def expected() -> Tensor:
        chosen = runs.choices[-1]
        inner = by_entry(runs.x, unpack(runs.gate_up, torch.float32), chosen, gate=True)
        found = by_entry(inner, unpack(runs.down_weight, torch.float32), chosen)
        return (found.float().view(rows, layer.topk, layer.hidden) * runs.weights[:, :, None]).sum(1)

    weights = [tensor for weight in (runs.gate_up, runs.down_weight) for tensor in weight.tensors().values()]
    read = sum(tensor.nbytes for tensor in weights) * runs.touched() / layer.experts
    flop = 6.0 * rows * layer.topk * layer.hidden * layer.wide
    return Launch(lambda: runs.of(plan), expected, read, flop, copies=len(runs.choices))


CASES: list[Case] = [
    (3, (4, 2, 160, 96), "mxfp4"), (40, (4, 2, 160, 96), AWQ), (5, (4, 3, 96, 64), f"{Q4_K} and {Q6_K}"),
    (150, (4, 2, 64, 32), W8A16), (7, (3, 2, 128, 64), "4 bits, groups of 64, nf4"),
]  # fmt: skip
OF_MODELS: list[Case] = [
    *((rows, QWEN3_30B_A3B, kind) for kind, rows in product((AWQ, W8A16, f"{Q4_K} and {Q6_K}"), ROWS)),
    *((rows, GPT_OSS_20B, "mxfp4") for rows in ROWS),
    *((rows, sizes, AWQ) for sizes, rows in product((MIXTRAL_8X7B, DEEPSEEK_V2_LITE), ROWS)),
]
OPS = (Op("packed_experts", _make, CASES, OF_MODELS, near=8),)
