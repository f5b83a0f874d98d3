"""Activations as 8-bit integers (reference.py), one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit
def _rounded(x):
    """To the nearest integer; halves to the even one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantise(
    x, given, given_zero, codes, scales, zeros, columns,
    BLOCK: tl.constexpr, STATIC: tl.constexpr, ZERO: tl.constexpr, SYMMETRIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    line = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    zero = 0.0
    if STATIC:
        scale = tl.load(given)
        if ZERO:
            zero = tl.load(given_zero)
    elif SYMMETRIC:
        scale = tl.maximum(tl.max(tl.abs(line), axis=0) / 127.0, 1e-12)
    else:
        least = tl.min(tl.where(inside, line, float("inf")), axis=0)
        most = tl.max(tl.where(inside, line, -float("inf")), axis=0)
        scale = tl.maximum((most - least) / 255.0, 1e-12)
        zero = _rounded(-128.0 - least / scale)
    found = tl.minimum(tl.maximum(_rounded(line / scale) + zero, -128.0), 127.0)
    tl.store(codes + row * columns + at, found.to(tl.int8), mask=inside)
    tl.store(scales + row, scale)
    tl.store(zeros + row, zero)


def quantise(
    x: Tensor, symmetric: bool, scale: Tensor | None = None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k], dense -> int8 [m, k], float32 scales [m, 1] and zero points [m, 1]. scale, zero: float32, where they are known."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    scales, zeros = torch.empty(2, rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    if rows:
        _quantise[(rows,)](
            x, scales if scale is None else scale, zeros if zero is None else zero, codes, scales, zeros, columns, BLOCK=block,
            STATIC=scale is not None, ZERO=zero is not None, SYMMETRIC=symmetric,
            num_warps=min(16, max(4, block // 1024)), **pdl.options(x),
        )  # fmt: skip
    return codes, scales, zeros
