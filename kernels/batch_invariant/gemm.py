"""Products whose every row is the same to the last bit, however many rows are computed beside it.

    out = x w^T [+ bias]                            accumulated in float32, rounded once
    out = silu(x w_gate^T) * (x w_up^T)             GATE; w holds the gate's rows, then the up projection's; rounded as unfused

An element's sum goes over the inputs in one order, which follows from the weight's sizes alone: shares of the inputs one behind the
other, a share by tensor core products of 16 inputs at a time. Few rows have a program for each share, and the last one to arrive adds
the shares up; of many rows one program does all shares of a tile and adds them up alike. All tiles have at least 64 rows, so that
Hopper multiplies all of them by the same instruction (wgmma; smaller ones would be mma's, which adds up otherwise). Nothing that a
compiler could contract in two ways follows the products. Rows and weights come by bulk copies (TMA), with zeros behind their ends.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels import pdl
from meshlm.kernels.small_m_gemm.kernel import LINE, _ask_for

FEW_ROWS = 128  # up to so many the shares are programs of their own
MOST_SPLITS, LEAST_SHARE = 4, 512
WANTED = 128  # programs of few rows
AHEAD = 512  # inputs of a program's weights that are asked for while the kernel before ends
GROUP = 8  # tiles of rows that share the columns of the weight
ALIGNED = 8  # inputs: what a bulk copy's lines are multiples of


@triton.jit
def _share(
    x, w, row, column, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products of inputs first .. last - 1, for the tile that begins at this row and column."""
    found = tl.zeros((BLOCK_M, HALVES * BLOCK_N), tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        y = x.load([row, k])
        weight = w.load([0, column, k]).reshape(HALVES * BLOCK_N, BLOCK_K)
        found = tl.dot(y, weight.T, found)
    return found


@triton.jit
def _write(
    total, bias, out, m, n, rows,
    OUTPUTS: tl.constexpr, HALVES: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if BIAS:
        total += tl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if HALVES == 2:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        gate, up = total.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        total = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32) * up
    inside = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * OUTPUTS + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x, w, w_lines, bias, out, parts, counters, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr, APART: tl.constexpr,
    HALVES: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, w: descriptors of [rows, INPUTS] and of w_lines [HALVES, OUTPUTS, INPUTS]. EACH: inputs of a share. APART: program_id(1) is
    the share, else there is no such program."""
    across: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    down = tl.cdiv(rows, BLOCK_M)
    nth = tl.program_id(0)
    above = nth // (GROUP * across) * GROUP
    height = tl.minimum(GROUP, down - above)
    within = nth % (GROUP * across)
    row, column = (above + within % height) * BLOCK_M, within // height * BLOCK_N
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    share = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD:
            line = w_lines + tl.minimum(n, OUTPUTS - 1)[:, None].to(tl.int64) * INPUTS
            _ask_for(line, share * EACH, AHEAD, LINES)
            if HALVES == 2:
                _ask_for(line + OUTPUTS * INPUTS, share * EACH, AHEAD, LINES)
        tl.extra.cuda.gdc_wait()
    if APART:
        first = share * EACH
        total = _share(
            x, w, row, column, first, tl.minimum(first + EACH, INPUTS), BLOCK_M, BLOCK_N, BLOCK_K, HALVES, STAGES
        )  # fmt: skip
    elif SPLITS == 1:
        total = _share(x, w, row, column, 0, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K, HALVES, STAGES)
    else:
        total = tl.zeros((BLOCK_M, HALVES * BLOCK_N), tl.float32)
        for nth_share in range(SPLITS):
            first = nth_share * EACH
            total += _share(
                x, w, row, column, first, tl.minimum(first + EACH, INPUTS), BLOCK_M, BLOCK_N, BLOCK_K, HALVES, STAGES
            )  # fmt: skip
    if APART and SPLITS > 1:
        WIDE: tl.constexpr = HALVES * BLOCK_N
        line = tl.arange(0, BLOCK_M)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        real = (m < rows)[:, None]
        tl.store(parts + (share * tl.num_programs(0) + nth) * BLOCK_M * WIDE + line, total, mask=real)
        tl.debug_barrier()
        if tl.atomic_add(counters + nth, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counters + nth, 0)
            total = tl.zeros((BLOCK_M, WIDE), tl.float32)
            for nth_share in tl.static_range(SPLITS):
                part = parts + (nth_share * tl.num_programs(0) + nth) * BLOCK_M * WIDE + line
                total += tl.load(part, mask=real, other=0.0, cache_modifier=".cg")
            _write(total, bias, out, m, n, rows, OUTPUTS, HALVES, BIAS, BLOCK_M, BLOCK_N)
    else:
        _write(total, bias, out, m, n, rows, OUTPUTS, HALVES, BIAS, BLOCK_M, BLOCK_N)


class Tile(NamedTuple):
    """Sizes of a tile (block_n: lines of the weight), warps and stages: all of them leave a row's bits as they are."""

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
    """outputs: lines of the weight."""
    splits = splits_of(outputs, inputs)
    if rows > FEW_ROWS:
        return Tile(128, 256 if splits == 1 else 128, 64, 8, 3)
    wide = triton.cdiv(outputs, 128) * splits >= WANTED
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
    x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, gate: bool = False,
    tile: Tile | None = None, apart: bool | None = None, splits: int = 0,
) -> Tensor:  # fmt: skip
    """x [m, k] (rows may be strided), w [n, k] dense, bias [n] -> [m, n], into `out` (dense) where it is given; gate: [m, n / 2].

    k and strides are multiples of ALIGNED. tile, apart: for tests and benches, which hold that a row's bits depend on neither; splits:
    for benches alone, since they do depend on it."""
    (rows, inputs), lines = x.shape, w.shape[0]
    assert inputs % ALIGNED == x.stride(0) % ALIGNED == 0
    halves = 2 if gate else 1
    outputs = lines // halves
    found = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return found
    block_m, wide, block_k, warps, stages = tile or tile_of(rows, lines, inputs)
    block_n, splits = wide // halves, splits or splits_of(lines, inputs)
    each = triton.cdiv(inputs, splits * block_k) * block_k
    apart = rows <= FEW_ROWS if apart is None else apart
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n)
    parts, counters = found, found
    if apart and splits > 1:
        parts, counters = _workspace(x.device).of(splits * tiles * block_m * wide, tiles)
    ahead = min(AHEAD, each) if apart else 0
    _gemm[(tiles, splits if apart else 1)](
        TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [block_m, block_k]),
        TensorDescriptor(w, [halves, outputs, inputs], [outputs * inputs, inputs, 1], [halves, block_n, block_k]),
        w, x if bias is None else bias, found, parts, counters, rows,
        INPUTS=inputs, OUTPUTS=outputs, SPLITS=splits, EACH=each, APART=apart, HALVES=halves, BIAS=bias is not None,
        GROUP=GROUP, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, AHEAD=ahead,
        LINES=triton.next_power_of_2(triton.cdiv(max(ahead, 1), LINE)), enable_fp_fusion=False,
        num_warps=warps, num_stages=stages, **pdl.options(x),
    )  # fmt: skip
    return found
