"""What the kernels of a mixture of experts compute, in plain torch: a product of each row with the weight of its expert."""

import torch
from torch import Tensor

from meshlm.kernels.silu_mul.reference import silu_mul


def product(x: Tensor, weight: Tensor, *, gate: bool = False) -> Tensor:
    """x [m, k], weight [n, k] -> [m, n]; gate: [2 n, k] -> silu(first half) * second half."""
    out = (x.float() @ weight.float().t()).to(x.dtype)
    return silu_mul(out) if gate else out


def by_entry(x: Tensor, weight: Tensor, experts: Tensor, *, gate: bool = False) -> Tensor:
    """x [m, k] or, for each entry, [m * topk, k]; weight [experts, n, k]; experts int32 [m, topk] -> [m * topk, n], 0 for -1."""
    entries, each = experts.numel(), experts.numel() // x.shape[0]
    outputs = weight.shape[1] // 2 if gate else weight.shape[1]
    out = torch.zeros(entries, outputs, dtype=x.dtype, device=x.device)
    for entry, expert in enumerate(experts.flatten().tolist()):
        if expert >= 0:
            row = entry // each
            out[entry] = product(x[row : row + 1], weight[expert], gate=gate)[0]
    return out
