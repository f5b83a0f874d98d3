"""Products whose every row is the same to the last bit, however many rows are computed beside it.

    out = x w^T [+ bias]        accumulated in float32, rounded once

An element's sum goes over the inputs in one order, which follows from the weight's sizes alone: shares of the inputs one behind the
other, a share by tensor core products of 16 inputs at a time. Few rows have a program for each share, and the last one to arrive adds
the shares up; of many rows one program does all shares of a tile and adds them up alike. All tiles have at least 64 rows, so that
Hopper multiplies all of them by the same instruction (wgmma; smaller ones would be mma's, which adds up otherwise). Nothing but
additions follows the products, so that no compiler can contract it in two ways.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.small_m_gemm.kernel import LINE, _ask_for

FEW_ROWS = 128  # up to so many the shares are programs of their own
MOST_SPLITS, LEAST_SHARE = 4, 512
WANTED = 128  # programs of few rows
AHEAD = 512  # inputs of a program's weights that are asked for while the kernel before ends
GROUP = 8  # tiles of rows that share the columns of the weight


@triton.jit
def _share(
    x_line, w_line, first, last, real_m, real_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products of inputs first .. last - 1; x_line [m, 1] and w_line [n, 1] point at each row's first."""
    found = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        if EVEN:
            y = tl.load(x_line + k[None, :], mask=real_m[:, None], other=0.0)
            weight = tl.load(w_line + k[None, :])
        else:
            there = (k < last)[None, :]
            y = tl.load(x_line + k[None, :], mask=real_m[:, None] & there, other=0.0)
            weight = tl.load(w_line + k[None, :], mask=real_n[:, None] & there, other=0.0)
        found = tl.dot(y, weight.T, found)
    return found


@triton.jit
def _write(total, bias, out, where, inside, n, real_n, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x, w, bias, out, parts, counters, rows, stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr, APART: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH: inputs of a share. APART: program_id(1) is the share, else there is no such program. stride: between rows of x."""
    across: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    down = tl.cdiv(rows, BLOCK_M)
    nth = tl.program_id(0)
    above = nth // (GROUP * across) * GROUP
    height = tl.minimum(GROUP, down - above)
    within = nth % (GROUP * across)
    m = (above + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    real_m, real_n = m < rows, n < OUTPUTS
    x_line = x + m[:, None].to(tl.int64) * stride
    w_line = w + tl.where(real_n, n, 0)[:, None].to(tl.int64) * INPUTS
    share = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD:
            _ask_for(w_line, share * EACH, AHEAD, LINES)
        tl.extra.cuda.gdc_wait()
    if APART:
        first = share * EACH
        last = tl.minimum(first + EACH, INPUTS)
        total = _share(x_line, w_line, first, last, real_m, real_n, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for nth_share in range(SPLITS):
            first = nth_share * EACH
            last = tl.minimum(first + EACH, INPUTS)
            total += _share(x_line, w_line, first, last, real_m, real_n, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES)
    inside = real_m[:, None] & real_n[None, :]
    where = m[:, None].to(tl.int64) * OUTPUTS + n[None, :]
    if APART and SPLITS > 1:
        size = rows.to(tl.int64) * OUTPUTS
        tl.store(parts + share * size + where, total, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(counters + nth, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counters + nth, 0)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for nth_share in tl.static_range(SPLITS):
                total += tl.load(parts + nth_share * size + where, mask=inside, other=0.0, cache_modifier=".cg")
            _write(total, bias, out, where, inside, n, real_n, BIAS)
    else:
        _write(total, bias, out, where, inside, n, real_n, BIAS)


class Tile(NamedTuple):
    """Sizes of a tile, warps and stages: all of them leave a row's bits as they are."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def splits_of(outputs: int, inputs: int) -> int:
    """The shares of the inputs: by the weight's sizes alone, for they decide in which order sums go."""
    tiles, splits = triton.cdiv(outputs, 128), 1
    while splits < MOST_SPLITS and tiles * splits < WANTED and inputs // (2 * splits) >= LEAST_SHARE:
        splits *= 2
    return splits


def tile_of(rows: int, outputs: int, inputs: int) -> Tile:
    if rows > FEW_ROWS:
        return Tile(128, 128, 64, 8, 3)
    wide = triton.cdiv(outputs, 128) * splits_of(outputs, inputs) >= WANTED
    block_m, warps = (64, 4) if rows <= 64 else (128, 8)
    return Tile(block_m, 128 if wide else 64, 64, warps, 4)


def warm_rows() -> set[int]:
    """So many rows meet every variant of the kernel."""
    return {64, FEW_ROWS, FEW_ROWS + 1}


class _Workspace:
    """Room for the shares of products of few rows on one device, and counters, which are zero between launches. Products run one after
    the other; CUDA graphs keep addresses, so a room that has become too small is kept beside its successor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms = [torch.empty(1 << 21, device=device)]
        self._counters = [torch.zeros(1 << 12, dtype=torch.int32, device=device)]

    def of(self, floats: int, tiles: int) -> tuple[Tensor, Tensor]:
        if self._rooms[-1].numel() < floats:
            self._rooms.append(torch.empty(1 << (floats - 1).bit_length(), device=self._device))
        if self._counters[-1].numel() < tiles:
            size = 1 << (tiles - 1).bit_length()
            self._counters.append(torch.zeros(size, dtype=torch.int32, device=self._device))
        return self._rooms[-1], self._counters[-1]


@cache
def _workspace(device: torch.device) -> _Workspace:
    return _Workspace(device)


def gemm(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, tile: Tile | None = None,
    apart: bool | None = None,
) -> Tensor:  # fmt: skip
    """x [m, k] (rows may be strided), w [n, k] dense, bias [n] -> [m, n], into `out` (dense) where it is given.

    tile, apart: for tests and benches, which hold that a row's bits depend on neither."""
    rows, inputs = x.shape
    outputs = w.shape[0]
    found = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return found
    block_m, block_n, block_k, warps, stages = tile or tile_of(rows, outputs, inputs)
    splits = splits_of(outputs, inputs)
    each = triton.cdiv(inputs, splits * block_k) * block_k
    apart = rows <= FEW_ROWS if apart is None else apart
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n)
    parts, counters = found, found
    if apart and splits > 1:
        parts, counters = _workspace(x.device).of(splits * rows * outputs, tiles)
    ahead = min(AHEAD, each if apart else inputs)
    _gemm[(tiles, splits if apart else 1)](
        x, w, x if bias is None else bias, found, parts, counters, rows, x.stride(0),
        INPUTS=inputs, OUTPUTS=outputs, SPLITS=splits, EACH=each, APART=apart, BIAS=bias is not None,
        EVEN=inputs % block_k == 0 and splits * each == inputs, GROUP=GROUP, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, STAGES=stages, AHEAD=ahead if apart else 0,
        LINES=triton.next_power_of_2(triton.cdiv(ahead, LINE)), enable_fp_fusion=False,
        num_warps=warps, num_stages=stages, **pdl.options(x),
    )  # fmt: skip
    return found
