"""The reference of the kernels of a mixture of experts, in plain torch: a product of each row with the weight of its expert."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue
from meshlm.kernels.moe_epilogue.reference import clamped_swiglu
from meshlm.kernels.silu_mul.reference import silu_mul


def product(
    x: Tensor, weight: Tensor, *, gate: bool = False, bias: Tensor | None = None, epilogue: Epilogue = PLAIN
) -> Tensor:
    """x [m, k], weight [n, k] -> [m, n]; gate: [2 n, k] -> silu(first half) * second half, or the epilogue's
    (without a gate [n, k]). bias [n] or [2 n]."""
    out = x.float() @ weight.float().t()
    out = (out if bias is None else out + bias.float()).to(x.dtype)
    if gate and not epilogue.gated:
        return F.relu(out).square()
    if gate and epilogue.alpha and not epilogue.limit:
        first, second = out.chunk(2, dim=-1)
        return (F.gelu(first.float(), approximate="tanh").to(x.dtype) * second).to(x.dtype)
    if gate and epilogue.alpha:
        first, second = out.float().chunk(2, dim=-1)
        return clamped_swiglu(first, second, epilogue.alpha, epilogue.limit).to(x.dtype)
    return silu_mul(out) if gate else out


def by_entry(x: Tensor, weight: Tensor, experts: Tensor, *, gate: bool = False, epilogue: Epilogue = PLAIN) -> Tensor:
    """x [m, k] or, for each entry, [m * topk, k]; weight [experts, n, k]; experts int32 [m, topk] -> [m * topk, n], 0 for -1."""
    entries, each = experts.numel(), experts.numel() // x.shape[0]
    outputs = weight.shape[1] // 2 if gate and epilogue.gated else weight.shape[1]
    out = torch.zeros(entries, outputs, dtype=x.dtype, device=x.device)
    for entry, expert in enumerate(experts.flatten().tolist()):
        if expert >= 0:
            row = entry // each
            bias = None if epilogue.bias is None else epilogue.bias[expert]
            out[entry] = product(x[row : row + 1], weight[expert], gate=gate, bias=bias, epilogue=epilogue)[0]
    return out
