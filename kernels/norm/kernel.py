"""RMSNorm, with the addition to the residual stream in front of it.

    residual += x            (add_rms_norm only; rounded to the stream's dtype, as a separate addition would be)
    out = residual / sqrt(mean(residual^2) + eps) * weight        (Zhang and Sennrich 2019, eq. 4)

Statistics in float32. One program a row: the row stays in registers between the two uses, so memory is touched once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, residual, weight, out, stride, columns, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        stream = tl.load(residual + row * columns + at, mask=inside, other=0.0)
        added = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32) + stream.to(tl.float32)
        line = added.to(stream.dtype).to(tl.float32)
        tl.store(residual + row * columns + at, line.to(stream.dtype), mask=inside)
    else:
        line = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(line * line, axis=0) / columns + eps)
    tl.store(out + row * columns + at, (line * inverse * scale).to(out.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    return min(16, max(4, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [m, n] (rows may be strided) -> [m, n]."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    _rms_norm[(rows,)](x, x, weight, out, x.stride(0), columns, eps, ADD=False, BLOCK=block, num_warps=_warps(block))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [m, n] += x [m, n], in place; the norm of the sum [m, n]."""
    rows, columns = x.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(columns)
    _rms_norm[(rows,)](
        x, residual, weight, out, x.stride(0), columns, eps, ADD=True, BLOCK=block, num_warps=_warps(block)
    )
    return out
