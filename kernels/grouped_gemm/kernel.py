"""Products of many rows, each with the weight of its expert:  out[r] = x[r] W[e(r)]^T, or silu(x W_gate^T) * (x W_up^T).

    sorted     rows lie as kernels/moe_align orders them: a tile of rows has one expert; x may still be in the order of tokens (GATHER)
    batched    x [experts, most, k], of which the first num_tokens[e] rows of each expert are real

As many programs as run at once take tiles in turn, as in kernels/gate_up_silu; how many tiles there are, the device knows alone. Tiles
that follow one another have the same weight or the same rows, in the L2 cache. Weights come by bulk copies (TMA), and so do rows that
lie together. Rounded where the unfused operations round.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels import pdl
from meshlm.kernels.moe_align.kernel import most_tiles
from meshlm.kernels.moe_few.kernel import part

GROUP = 8  # tiles of rows that share columns of a weight
ALIGNED = 8  # elements: what a bulk copy's lines are multiples of


@triton.jit
def _tile_at(nth, down, across, GROUP: tl.constexpr):
    """Row and column of the nth tile, of down x across: by columns within GROUP rows of tiles."""
    first = nth // (GROUP * across) * GROUP
    height = tl.minimum(GROUP, down - first)
    within = nth % (GROUP * across)
    return first + within % height, within // height


@triton.jit(do_not_specialize=["most"])
def _grouped_gemm(
    x, w, out, ids, ends, x_scales, w_scales, most,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr,
    GATHER: tl.constexpr, BATCHED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, FLAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_E: tl.constexpr,
    X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """w is a descriptor of [EXPERTS, 1 or 2 (gate and up), OUTPUTS, INPUTS]; out, and x unless GATHER, of
    [1 or EXPERTS, rows, columns].

    ends int32 [EXPERTS]: see moe_align; batched: num_tokens, and `most` rows of each expert. Scales: as in kernels/moe_few.
    """
    at = tl.arange(0, BLOCK_E)
    if BATCHED:
        tiles = (tl.load(ends + at, mask=at < EXPERTS, other=0) + BLOCK_M - 1) // BLOCK_M
        until = tl.cumsum(tiles, axis=0)
        down = tl.sum(tiles, axis=0)
    else:
        until = tl.load(ends + at, mask=at < EXPERTS, other=0x7FFFFFFF)
        down = tl.load(ends + EXPERTS - 1)
    across: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    for nth in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLAT):
        row, column = _tile_at(nth, down, across, GROUP)
        expert = tl.sum((until <= row).to(tl.int32), axis=0)
        if BATCHED:
            row -= tl.sum(tl.where(at == expert, until - tiles, 0), axis=0)
            slab = expert
        else:
            slab = 0
        if GATHER:
            entry = tl.load(ids + row * BLOCK_M + tl.arange(0, BLOCK_M))
            token = tl.where(entry >= 0, entry // TOPK, 0)
            line = x + token.to(tl.int64)[:, None] * INPUTS
        else:
            token = slab * most + row * BLOCK_M + tl.arange(0, BLOCK_M)
        x_scale = x_scales + token.to(tl.int64) * X_GROUPS
        there = row * BLOCK_M + tl.arange(0, BLOCK_M) < most  # a batch's last tile may reach behind it
        wide: tl.constexpr = 2 * BLOCK_N if GATE else BLOCK_N
        halves: tl.constexpr = 2 if GATE else 1
        nth_column = tl.arange(0, wide)
        output = column * BLOCK_N + nth_column % BLOCK_N
        real = output < OUTPUTS
        w_scale = w_scales + ((expert * halves + nth_column // BLOCK_N).to(tl.int64) * OUTPUTS + output) * W_GROUPS
        if GATE:
            both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        else:
            both = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
            if GATHER:
                inside = k + tl.arange(0, BLOCK_K)
                if INPUTS % BLOCK_K == 0:
                    y = tl.load(line + inside[None, :])
                else:
                    y = tl.load(line + inside[None, :], mask=(inside < INPUTS)[None, :], other=0.0)
            else:
                y = x.load([slab, row * BLOCK_M, k]).reshape(BLOCK_M, BLOCK_K)
            if GATE:
                weight = w.load([expert, 0, column * BLOCK_N, k]).reshape(2 * BLOCK_N, BLOCK_K)
            else:
                weight = w.load([expert, 0, column * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
            if W_GROUPS > 1:
                scale = tl.load(w_scale + k // BLOCK_K, mask=real, other=0.0)[None, :]
                if X_GROUPS > 1:
                    scale = scale * tl.load(x_scale + k // BLOCK_K, mask=there, other=0.0)[:, None]
                both += part(y, weight, UPCAST) * scale
            elif W_GROUPS == 1:
                both += part(y, weight, UPCAST)
            else:
                both = tl.dot(y, weight.T, both)
        if W_GROUPS == 1:
            both *= tl.load(w_scale, mask=real, other=0.0)[None, :]
        if X_GROUPS == 1:
            both *= tl.load(x_scale, mask=there, other=0.0)[:, None]
        if GATE:
            both = both.to(out.dtype).to(tl.float32)
            gate, up = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
            gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype).to(tl.float32)
            both = gate * up
        out.store([slab, row * BLOCK_M, column * BLOCK_N], both.to(out.dtype).reshape(1, BLOCK_M, BLOCK_N))


class Shape(NamedTuple):
    """Sizes of a tile (block_n: of a gate's columns, and as many of up's), warps, stages; programs on each multiprocessor."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    flat: bool = False
    programs: int = 1


Scales = tuple[Tensor | None, Tensor | None]
"""Of x and of the weight, where they are 8-bit floats: see kernels/moe_few."""


def _launch(
    x: Tensor, w: Tensor, out: Tensor, shape: Shape, most: int, ends: Tensor, ids: Tensor | None, num_topk: int,
    scales: Scales, *, gate: bool,
) -> None:  # fmt: skip
    """x [tokens, k] with ids, else [1 or experts, rows, k]; out [1 or experts, rows, n]. most: tiles of rows that there may be."""
    num_experts, inputs = w.shape[0], w.shape[2]
    outputs = w.shape[1] // 2 if gate else w.shape[1]
    assert inputs % ALIGNED == outputs % ALIGNED == 0
    block_m, block_n, block_k = shape.block_m, shape.block_n, shape.block_k
    halves, slabs, rows = 2 if gate else 1, *out.shape[:2]
    programs = min(most * triton.cdiv(outputs, block_n), shape.programs * pdl.multiprocessors(out.device))
    given = (
        x
        if ids is not None
        else TensorDescriptor(x, [slabs, rows, inputs], [rows * inputs, inputs, 1], [1, block_m, block_k])
    )
    _grouped_gemm[(max(1, programs),)](
        given,
        TensorDescriptor(
            w, [num_experts, halves, outputs, inputs], [halves * outputs * inputs, outputs * inputs, inputs, 1],
            [1, halves, block_n, block_k],
        ),
        TensorDescriptor(out, [slabs, rows, outputs], [rows * outputs, outputs, 1], [1, block_m, block_n]),
        ends if ids is None else ids, ends, *(ends if each is None else each for each in scales),
        rows if ids is None else 1 << 30, EXPERTS=num_experts, TOPK=num_topk, INPUTS=inputs, OUTPUTS=outputs, GATE=gate,
        GATHER=ids is not None, BATCHED=slabs > 1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=shape.stages,
        FLAT=shape.flat, GROUP=GROUP, BLOCK_E=triton.next_power_of_2(num_experts),
        X_GROUPS=0 if scales[0] is None else scales[0].shape[-1], W_GROUPS=0 if scales[1] is None else scales[1].shape[-1],
        UPCAST=not out.is_cuda, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def sorted_gemm(
    x: Tensor, w: Tensor, out: Tensor, shape: Shape, ends: Tensor, ids: Tensor | None = None, num_topk: int = 1,
    entries: int = 0, scales: "Scales" = (None, None), *, gate: bool = False,
) -> Tensor:  # fmt: skip
    """x [tokens, k] with ids of entries, or [rows, k] in their order; w [experts, n, k] (gate: [experts, 2 n, k]); out [rows, n].

    ends, ids: as moe_align gives them for tiles of shape.block_m. entries: of them there are so many at most.
    """
    most = most_tiles(entries, w.shape[0], shape.block_m) if entries else out.shape[0] // shape.block_m
    _launch(x if ids is not None else x[None], w, out[None], shape, most, ends, ids, num_topk, scales, gate=gate)
    return out


def batched_gemm(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    shape: Shape,
    num_tokens: Tensor,
    scales: "Scales" = (None, None),
    *,
    gate: bool = False,
) -> Tensor:
    """x [experts, most, k], num_tokens int32 [experts] -> out [experts, most, n]; what lies behind num_tokens is anything."""
    _launch(
        x, w, out, shape, x.shape[0] * triton.cdiv(x.shape[1], shape.block_m), num_tokens, None, 1, scales, gate=gate
    )
    return out
