"""RMSNorm, with the addition to the residual stream in front of it.

    x = x / sqrt(mean(x^2) + eps) * own              (a norm of x alone, before it is added; rounded as a separate norm would be)
    residual += x            (add_rms_norm only; rounded to the stream's dtype, as a separate addition would be)
    out = residual / sqrt(mean(residual^2) + eps) * weight        (Zhang and Sennrich 2019, eq. 4)

Statistics in float32. One program a row: the row stays in registers between the two uses, so memory is touched once. x may be parts of
a sum (kernels/small_m_gemm), which are added up first.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit
def _normed(line, factor, columns, eps):
    """line and factor float32; nothing is beside the columns."""
    return line * tl.rsqrt(tl.sum(line * line, axis=0) / columns + eps) * factor


@triton.jit
def _rms_norm(
    x, residual, weight, own, out, stride, part, columns, eps, own_eps,
    SPLITS: tl.constexpr, ADD: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """stride: from a row of x to the next. SPLITS: parts of x, `part` apart; 0: x is whole."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if OWN:
        own_factor = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ADD:
        stream = tl.load(residual + row * columns + at, mask=inside, other=0.0)
    if SPLITS:
        line = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            line += tl.load(x + split * part + row * stride + at, mask=inside, other=0.0)
        line = line.to(out.dtype.element_ty).to(tl.float32)
    else:
        line = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        if OWN:
            line = _normed(line, own_factor, columns, own_eps).to(stream.dtype).to(tl.float32)
        line = (line + stream.to(tl.float32)).to(stream.dtype)
        tl.store(residual + row * columns + at, line, mask=inside)
        line = line.to(tl.float32)
    tl.store(out + row * columns + at, _normed(line, factor, columns, eps).to(out.dtype.element_ty), mask=inside)


MANY_PARTS = 6


def _warps(block: int) -> int:
    return min(16, max(4, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, options: Mapping[str, bool] | None = None) -> Tensor:
    """x [m, n] (rows may be strided) -> [m, n]. options: of the launch, for all numbers of rows; None: by their number."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    _rms_norm[(rows,)](
        x, x, weight, x, out, x.stride(0), 0, columns, eps, 0.0, SPLITS=0, ADD=False, OWN=False, BLOCK=block,
        num_warps=_warps(block), **(options or pdl.options(x, rows)),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, own: tuple[Tensor, float] | None = None, *,
    options: Mapping[str, bool] | None = None,
) -> Tensor:  # fmt: skip
    """residual [m, n] += x [m, n] (or the sum of x [s, m, n], float32, dense), in place; the norm of that [m, n].

    own: weight and eps of a norm of x, or of that sum, before it is added. options: see `rms_norm`."""
    rows, columns = residual.shape
    splits = x.shape[0] if x.dim() == 3 else 0
    out = torch.empty_like(residual)
    own_weight, own_eps = own or (x, 0.0)
    block = triton.next_power_of_2(columns)
    warps = _warps(block) if splits < MANY_PARTS else min(16, max(4, block // 128))  # all parts are asked for at once
    _rms_norm[(rows,)](
        x, residual, weight, own_weight, out, x.stride(-2), rows * columns, columns, eps, own_eps,
        SPLITS=splits, ADD=True, OWN=own is not None, BLOCK=block, num_warps=warps,
        **(options or pdl.options(x, 0 if splits else rows)),
    )  # fmt: skip
    return out
