"""The gate of a gated MLP:  out = act(gate) * up        (Shazeer 2020: SwiGLU, GEGLU, ReGLU)

    silu(x) = x / (1 + exp(-x))
    gelu_pytorch_tanh(x) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) (x + 0.044715 x^3)
    gelu(x) = x (1 + erf(x / sqrt(2))) / 2;  relu(x) = max(x, 0);  relu2(x) = relu(x)^2

gate and up are the halves of one row, as the joint projection leaves them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl

ACTS = ("silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2")  # by ACT


@triton.jit
def activated(x, ACT: tl.constexpr):
    """x float32. ACT: place in ACTS."""
    if ACT == 0:
        found = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        found = x / (1.0 + tl.exp(tl.minimum(-1.5957691216057308 * (x + 0.044715 * x * x * x), 80.0)))
    elif ACT == 2:
        found = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        found = tl.maximum(x, 0.0)
        if ACT == 4:
            found *= found
    return found


@triton.jit
def _act_mul(gate_up, out, columns, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl.follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    from_ = gate_up + row * (2 * columns) + at
    gate = tl.load(from_, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(from_ + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded after the activation, as the unfused operations round.
    act = activated(gate, ACT).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + at, (act * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[m, 2n], dense -> [m, n]."""
    return act_mul(gate_up, "silu")


def act_mul(gate_up: Tensor, act: str, block: int = 0) -> Tensor:
    """[m, 2n], dense -> [m, n]. act: one of ACTS; ValueError for another. block: columns of a program; 0: by the number of rows."""
    if act not in ACTS:
        raise ValueError(f"{act}: no activation of {', '.join(ACTS)}")
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    block = block or (512 if rows < 64 else min(4096, triton.next_power_of_2(columns)))
    _act_mul[(rows, triton.cdiv(columns, block))](
        gate_up, out, columns, ACT=ACTS.index(act), BLOCK=block, num_warps=max(4, block // 512), **pdl.options(gate_up),
    )  # fmt: skip
    return out
