"""Activations as 8-bit floats:  s = max |x| / 448 of a row, or of each group of its columns;  q = e4m3(x / s)

A scale is a row's own, so a text does not depend on the rows beside it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.float8 import DTYPE
from meshlm.kernels.fp8 import within


@triton.jit
def _quantise(
    x, given, codes, scales, columns, groups,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = group * SIZE + tl.arange(0, BLOCK)
    inside = (tl.arange(0, BLOCK) < SIZE) & (at < columns)
    line = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(given)
    else:
        scale = tl.maximum(tl.max(tl.abs(line), axis=0) / 448.0, 1e-12)
    tl.store(codes + row * columns + at, within(line, scale, 448.0).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row * groups + group, scale)


def quantise(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [m, k], dense -> e4m3 [m, k] and float32 [m, groups]; group: columns that have a scale together, 0: all of a row.

    scale: float32, one number that is everybody's, where that is known beforehand."""
    rows, columns = x.shape
    size = group or columns
    groups = triton.cdiv(columns, size)
    codes = torch.empty(rows, columns, dtype=DTYPE, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if rows:
        _quantise[(rows, groups)](
            x, scales if scale is None else scale, codes, scales, columns, groups, SIZE=size, BLOCK=triton.next_power_of_2(size),
            STATIC=scale is not None, num_warps=1 if size <= 256 else 4, **pdl.options(x),
        )  # fmt: skip
    return codes, scales
