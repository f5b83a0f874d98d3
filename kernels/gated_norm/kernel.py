"""RMSNorm of each group of a line's numbers beside a gate (reference.py has both orders). A program has a line and a group of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit
def _gated_norm(
    y, gate, weight, out, y_stride, gate_stride, columns, eps,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BEFORE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    at = tl.arange(0, BLOCK)
    inside = at < GROUP
    line = tl.load(y + row * y_stride + first + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + first + at, mask=inside, other=0.0).to(tl.float32)
    gates = z * tl.sigmoid(z)
    if not BEFORE:
        line *= gates
    if NORM:
        line *= tl.rsqrt(tl.sum(line * line, axis=0) / GROUP + eps)
        if not BEFORE:
            line = line.to(out.dtype.element_ty).to(tl.float32)
        scale = tl.load(weight + (0 if SHARED else first) + at, mask=inside, other=0.0).to(tl.float32)
        line *= scale
    if BEFORE:
        line *= gates
    tl.store(out + row * columns + first + at, line.to(out.dtype.element_ty), mask=inside)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor | None, eps: float, group: int, *, before: bool) -> Tensor:
    """y, gate [m, n], whose rows may be strided -> [m, n]: see reference.py."""
    y, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (y, gate))
    rows, columns = y.shape
    out = torch.empty(rows, columns, dtype=y.dtype, device=y.device)
    block = triton.next_power_of_2(group)
    _gated_norm[(rows, columns // group)](
        y, gate, y if weight is None else weight, out, y.stride(0), gate.stride(0), columns, eps,
        GROUP=group, SHARED=weight is not None and len(weight) == group, BEFORE=before, NORM=weight is not None,
        BLOCK=block, num_warps=min(16, max(1, block // 512)), **pdl.options(y, rows),
    )  # fmt: skip
    return out
