"""The gate of a gated MLP:  out = silu(gate) * up,  silu(x) = x / (1 + exp(-x))        (Shazeer 2020, SwiGLU).

gate and up are the halves of one row, as the joint projection leaves them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit
def _silu_mul(gate_up, out, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    from_ = gate_up + row * (2 * columns) + at
    gate = tl.load(from_, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(from_ + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded after silu, as the unfused operations round.
    act = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + at, (act * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[m, 2n], dense -> [m, n]."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    block = 512 if rows < 64 else min(4096, triton.next_power_of_2(columns))
    use_pdl = gate_up.is_cuda and pdl.supported()
    _silu_mul[(rows, triton.cdiv(columns, block))](
        gate_up, out, columns, BLOCK=block, PDL=use_pdl, num_warps=max(4, block // 512),
        **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out
