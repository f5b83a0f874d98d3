"""Products of weights and activations that are 8-bit floats, multiplied as they are:  out = (x_q s_x) (w_q s_w)^T + bias

Both may be 8-bit integers too, with a scale for each row, and a zero point for each row of x:  x = (x_q - z_x) s_x
s_x and s_w are of a row, or of each group of BLOCK_K inputs. x may also be of 16 bits, without scales; then w is raised to its type.
Of few rows the weight is the left operand (SWAP): tensor cores take 64 rows of that at least, and 8 columns of the other. Of many rows
with one scale each, cuBLAS and CUTLASS multiply (torch._scaled_mm).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl, tables
from meshlm.kernels.moe_sum.kernel import sum_parts

MANY_ROWS = 64  # from more rows on torch._scaled_mm is called
ALIGNED = 16  # what its sizes are multiples of


@triton.jit
def _tile_at(nth, down, across, GROUP: tl.constexpr):
    """Row and column of the nth tile: by columns within GROUP rows of tiles, which share the columns of the weight."""
    first = nth // (GROUP * across) * GROUP
    height = tl.minimum(GROUP, down - first)
    within = nth % (GROUP * across)
    return first + within % height, within // height


@triton.jit(do_not_specialize=["rows"])
def _fp8_gemm(
    x, w, out, x_scales, w_scales, x_zeros, w_sums, bias, rows, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, EACH: tl.constexpr,
    X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, BIAS: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, SWAP:
    tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """EACH: inputs of a part. X_GROUPS: scales of a row of x; 0: it has none. UPCAST: for who cannot multiply 8-bit floats."""
    across: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    row, column = _tile_at(tl.program_id(0), (rows + BLOCK_M - 1) // BLOCK_M, across, 8)
    split = tl.program_id(1)
    m, n = row * BLOCK_M + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N)
    real, there = m < rows, n < OUTPUTS
    x_line = x + tl.where(real, m, 0)[:, None].to(tl.int64) * INPUTS
    w_line = w + tl.where(there, n, 0)[:, None].to(tl.int64) * INPUTS
    pdl.follow(PDL)
    kind: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), kind)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), kind)
    for begin in tl.range(split * EACH, min(split * EACH + EACH, INPUTS), BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        if INPUTS % BLOCK_K == 0:
            y = tl.load(x_line + k[None, :])
            tile = tl.load(w_line + k[None, :])
        else:
            y = tl.load(x_line + k[None, :], mask=(k < INPUTS)[None, :], other=0.0)
            tile = tl.load(w_line + k[None, :], mask=(k < INPUTS)[None, :], other=0.0)
        if UPCAST:
            y = y.to(tl.float32)
        tile = tile.to(y.dtype)
        if W_GROUPS == 1:
            if SWAP:
                total = tl.dot(tile, y.T, total, out_dtype=kind)
            else:
                total = tl.dot(y, tile.T, total, out_dtype=kind)
        else:
            w_scale = tl.load(w_scales + n * W_GROUPS + begin // BLOCK_K, mask=there, other=0.0)
            x_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
            if X_GROUPS > 1:
                x_scale = tl.load(x_scales + m.to(tl.int64) * X_GROUPS + begin // BLOCK_K, mask=real, other=0.0)
            if SWAP:
                total += tl.dot(tile, y.T) * w_scale[:, None] * x_scale[None, :]
            else:
                total += tl.dot(y, tile.T) * x_scale[:, None] * w_scale[None, :]
    if SWAP:
        total = total.T
    if INTEGERS:
        total = total.to(tl.float32)
    if ZEROS:
        part = tl.load(w_sums + split * OUTPUTS + n, mask=there, other=0.0)
        total -= tl.load(x_zeros + m, mask=real, other=0.0)[:, None] * part[None, :]
    if W_GROUPS == 1:
        total *= tl.load(w_scales + n, mask=there, other=0.0)[None, :]
    if X_GROUPS == 1:
        total *= tl.load(x_scales + m, mask=real, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
    to = out + (split * rows + m)[:, None].to(tl.int64) * OUTPUTS + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


class Shape(NamedTuple):
    """Sizes of a tile (block_k is that of groups), parts of the inputs, warps, stages; whether the weight is the left operand."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    swap: bool = False


@cache
def shape_for(rows: int, outputs: int, inputs: int, group: int, device: torch.device) -> Shape:
    """The measured shape of these sizes; else one that gives every multiprocessor work. group: inputs that share a scale; 0: all."""
    known = tables.for_rows(_table().get((outputs, inputs, f"groups of {group}"), []), rows)
    if known is not None:
        return known
    block_k = group or 128
    if rows > MANY_ROWS:
        return Shape(128 if rows > 128 else 64, 128, block_k, 1, 8 if rows > 128 else 4, 3)
    block_m, block_n = max(16, triton.next_power_of_2(rows)), 64
    programs, splits = pdl.multiprocessors(device), 1
    tiles = triton.cdiv(outputs, block_n)
    if block_m == 64 and not group:  # as measured with 64 rows
        if tiles > programs:
            return Shape(block_m, block_n, 128, 1, 4, 5, swap=True)
        while splits < 8 and 2 * tiles * splits <= programs and inputs >= 2048 * splits:
            splits *= 2
        return Shape(block_m, block_n, 256, splits, 4, 4, swap=True)
    while splits < 8 and tiles * splits < programs and inputs >= 8 * splits * block_k:
        splits *= 2
    return Shape(block_m, block_n, block_k, splits, 4, 4, swap=True)


@cache
def _table() -> dict[tuple[int, int, str], list[tuple[int, int, Shape]]]:
    return {
        key: [(over, to, Shape(*shape)) for over, to, shape in rows]
        for key, rows in tables.products("fp8_gemm").items()
    }


def parts(
    x: Tensor, x_scales: Tensor | None, w: Tensor, w_scales: Tensor, shape: Shape, dtype: torch.dtype,
    bias: Tensor | None = None, zeros: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """[m, outputs] of this dtype, or float32 [splits, m, outputs].

    zeros: of integers, which go in one part: zero points of x [m, 1], and the sums of the weight's rows [outputs]."""
    (rows, inputs), outputs = x.shape, w.shape[0]
    assert shape.splits == 1 or (bias is None and zeros is None)
    x_groups, w_groups = 0 if x_scales is None else x_scales.shape[1], w_scales.shape[1]
    sizes, of = ((rows, outputs), dtype) if shape.splits == 1 else ((shape.splits, rows, outputs), torch.float32)
    out = torch.empty(sizes, dtype=of, device=x.device)
    each = triton.cdiv(triton.cdiv(inputs, shape.splits), shape.block_k) * shape.block_k
    tiles = triton.cdiv(outputs, shape.block_n) * triton.cdiv(rows, shape.block_m)
    _fp8_gemm[(tiles, shape.splits)](
        x, w, out, x if x_scales is None else x_scales, w_scales, *((x, x) if zeros is None else zeros), x if bias is None else
        bias, rows, INPUTS=inputs, OUTPUTS=outputs, EACH=each, X_GROUPS=x_groups, W_GROUPS=w_groups, BIAS=bias is not None,
        INTEGERS=x.dtype == torch.int8, ZEROS=zeros is not None, SWAP=shape.swap, UPCAST=not x.is_cuda and x.dtype != torch.int8,
        BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, STAGES=shape.stages,
        num_warps=shape.warps, **pdl.options(x),
    )  # fmt: skip
    return out


def fp8_gemm(
    x: Tensor, x_scales: Tensor | None, w: Tensor, w_scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    group: int = 0,
) -> Tensor:  # fmt: skip
    """x e4m3 [m, k] with float32 scales [m, 1 or groups], or of 16 bits without; w e4m3 [n, k] with [n, 1 or groups] -> [m, n].

    group: inputs that share a scale, where there are groups."""
    rows, outputs = x.shape[0], w.shape[0]
    aligned = w.shape[1] % ALIGNED == 0 and outputs % ALIGNED == 0
    if rows > MANY_ROWS and x_scales is not None and group == 0 and dtype == torch.bfloat16 and x.is_cuda and aligned:
        found: Tensor = torch._scaled_mm(
            x, w.t(), scale_a=x_scales, scale_b=w_scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
        )
        return found
    shape = shape_for(rows, outputs, w.shape[1], group, x.device)
    if shape.splits == 1:
        return parts(x, x_scales, w, w_scales, shape, dtype, bias)
    summed = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    sum_parts(parts(x, x_scales, w, w_scales, shape, dtype), summed)
    return summed if bias is None else summed.add_(bias)


def int8_gemm(
    x: Tensor, x_scales: Tensor, x_zeros: Tensor | None, w: Tensor, w_scales: Tensor, w_sums: Tensor,
    bias: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x int8 [m, k], float32 scales and zero points [m, 1]; w int8 [n, k], float32 scales [n, 1] and sums [n] -> [m, n]."""
    rows, (outputs, inputs) = x.shape[0], w.shape
    shape = shape_for(rows, outputs, inputs, 0, x.device)
    zeros = None if x_zeros is None else (x_zeros, w_sums)
    if shape.splits == 1 or zeros is not None:
        return parts(x, x_scales, w, w_scales, shape._replace(splits=1), dtype, bias, zeros)
    summed = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    sum_parts(parts(x, x_scales, w, w_scales, shape, dtype), summed)
    return summed if bias is None else summed.add_(bias)


def takes(group: int) -> bool:
    """Whether tiles can be of groups of this size."""
    return group in (0, 32, 64, 128)
