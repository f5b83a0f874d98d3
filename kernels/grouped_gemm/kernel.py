"""Products of many rows, each with the weight of its expert:  out[r] = x[r] W[e(r)]^T, or silu(x W_gate^T) * (x W_up^T);
without a gate relu(x W^T)^2; with a bias, or another activation, where kernels/moe_epilogue says so.

Rows lie as kernels/moe_align orders them: a tile of rows has one expert; x may still be in the order of tokens (GATHER).

As many programs as run at once take tiles in turn, as in kernels/gate_up_silu; how many tiles there are, the device knows alone. Tiles
that follow one another have the same weight or the same rows, in the L2 cache. Weights come by bulk copies (TMA), and so do rows that
lie together. Rounded where the unfused operations round.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels import pdl
from meshlm.kernels.moe_align.kernel import most_tiles
from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue, activated, squared_relu
from meshlm.kernels.moe_few.kernel import part

GROUP = 8  # tiles of rows that share columns of a weight
CHECKED = "3.6."  # versions of Triton
ALIGNED = 8  # elements: what a bulk copy's lines are multiples of


@triton.jit
def _tile_at(nth, down, across, GROUP: tl.constexpr):
    """Row and column of the nth tile, of down x across: by columns within GROUP rows of tiles."""
    first = nth // (GROUP * across) * GROUP
    height = tl.minimum(GROUP, down - first)
    within = nth % (GROUP * across)
    return first + within % height, within // height


@triton.jit
def _lines(
    x, tile, token, k,
    INPUTS: tl.constexpr, GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Inputs k .. k + BLOCK_K - 1 of a tile's rows."""
    if GATHER:
        inside = k + tl.arange(0, BLOCK_K)
        line = x + token.to(tl.int64)[:, None] * INPUTS
        if INPUTS % BLOCK_K == 0:
            y = tl.load(line + inside[None, :])
        else:
            y = tl.load(line + inside[None, :], mask=(inside < INPUTS)[None, :], other=0.0)
    else:
        y = x.load([0, tile * BLOCK_M, k]).reshape(BLOCK_M, BLOCK_K)
    return y


@triton.jit
def _add(
    total, y, weight, w_scale, real, x_scales, token, there, k,
    BLOCK_K: tl.constexpr, X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """total + y weight^T of a group of inputs, with their scales where these differ from group to group."""
    if W_GROUPS > 1:
        scale = tl.load(w_scale + k // BLOCK_K, mask=real, other=0.0)[None, :]
        if X_GROUPS > 1:
            scale = (
                scale * tl.load(x_scales + token.to(tl.int64) * X_GROUPS + k // BLOCK_K, mask=there, other=0.0)[:, None]
            )
        total += part(y, weight, UPCAST) * scale
    elif W_GROUPS == 1:
        total += part(y, weight, UPCAST)
    else:
        total = tl.dot(y, weight.T, total)
    return total


@triton.jit
def _finish(
    both, out, tile, column, entry, rows, weights, w_scale, bias, real, x_scales, token, there,
    TOPK: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores a tile of the products."""
    if W_GROUPS == 1:
        both *= tl.load(w_scale, mask=real, other=0.0)[None, :]
    if X_GROUPS == 1:
        both *= tl.load(x_scales + token.to(tl.int64), mask=there, other=0.0)[:, None]
    if BIAS:
        both += tl.load(bias, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATE and GATED:
        gate, up = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        both = activated(gate, up, out.dtype, ALPHA, LIMIT)
    elif GATE:
        both = squared_relu(both, out.dtype)
    if PARTS:
        both *= tl.load(weights + entry, mask=entry >= 0, other=0.0)[:, None]
        line = out + ((entry % TOPK) * rows + entry // TOPK).to(tl.int64)[:, None] * OUTPUTS
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(line + n[None, :], both.to(out.dtype.element_ty), mask=(entry >= 0)[:, None] & (n < OUTPUTS)[None, :])
    else:
        out.store([0, tile * BLOCK_M, column * BLOCK_N], both.to(out.dtype).reshape(1, BLOCK_M, BLOCK_N))


@triton.jit
def _which(
    ids, tile, most,
    TOPK: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Each row of a tile: its entry, the row of x and of its scales, and whether there is one (the last tile may reach behind)."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    entry = row
    token = row
    if GATHER or PARTS:
        entry = tl.load(ids + row)
    if GATHER:
        token = tl.where(entry >= 0, entry // TOPK, 0)
    return entry, token, row < most


@triton.jit
def _span(
    x, w, out, ids, weights, x_scales, w_scales, biases, most, rows, expert, first, column,
    TILES: tl.constexpr, TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr, GATHER: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, UPCAST: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one expert's rows by one reading of its columns."""
    halves: tl.constexpr = 2 if GATE and GATED else 1
    wide: tl.constexpr = halves * BLOCK_N
    nth = tl.arange(0, wide)
    output = column * BLOCK_N + nth % BLOCK_N
    real = output < OUTPUTS
    line = (expert * halves + nth // BLOCK_N).to(tl.int64) * OUTPUTS + output
    w_scale, bias = w_scales + line * W_GROUPS, biases + line
    entry, token, there = _which(ids, first, most, TOPK, GATHER, PARTS, BLOCK_M)
    total = tl.zeros((BLOCK_M, wide), tl.float32)
    if TILES > 1:
        entry1, token1, there1 = _which(ids, first + 1, most, TOPK, GATHER, PARTS, BLOCK_M)
        total1 = tl.zeros((BLOCK_M, wide), tl.float32)
    if TILES > 2:
        entry2, token2, there2 = _which(ids, first + 2, most, TOPK, GATHER, PARTS, BLOCK_M)
        total2 = tl.zeros((BLOCK_M, wide), tl.float32)
    for k in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        weight = w.load([expert, 0, column * BLOCK_N, k]).reshape(wide, BLOCK_K)
        y = _lines(x, first, token, k, INPUTS, GATHER, BLOCK_M, BLOCK_K)
        total = _add(total, y, weight, w_scale, real, x_scales, token, there, k, BLOCK_K, X_GROUPS, W_GROUPS, UPCAST)
        if TILES > 1:
            y1 = _lines(x, first + 1, token1, k, INPUTS, GATHER, BLOCK_M, BLOCK_K)
            total1 = _add(
                total1, y1, weight, w_scale, real, x_scales, token1, there1, k, BLOCK_K, X_GROUPS, W_GROUPS, UPCAST
            )
        if TILES > 2:
            y2 = _lines(x, first + 2, token2, k, INPUTS, GATHER, BLOCK_M, BLOCK_K)
            total2 = _add(
                total2, y2, weight, w_scale, real, x_scales, token2, there2, k, BLOCK_K, X_GROUPS, W_GROUPS, UPCAST
            )
    _finish(
        total, out, first, column, entry, rows, weights, w_scale, bias, real, x_scales, token, there,
        TOPK, OUTPUTS, GATE, PARTS, BLOCK_M, BLOCK_N, X_GROUPS, W_GROUPS, BIAS, ALPHA, LIMIT, GATED,
    )  # fmt: skip
    if TILES > 1:
        _finish(
            total1, out, first + 1, column, entry1, rows, weights, w_scale, bias, real, x_scales, token1, there1,
            TOPK, OUTPUTS, GATE, PARTS, BLOCK_M, BLOCK_N, X_GROUPS, W_GROUPS, BIAS, ALPHA, LIMIT, GATED,
        )  # fmt: skip
    if TILES > 2:
        _finish(
            total2, out, first + 2, column, entry2, rows, weights, w_scale, bias, real, x_scales, token2, there2,
            TOPK, OUTPUTS, GATE, PARTS, BLOCK_M, BLOCK_N, X_GROUPS, W_GROUPS, BIAS, ALPHA, LIMIT, GATED,
        )  # fmt: skip


@triton.jit
def _ask_for(
    w, expert, column, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_N: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Have the first EACH inputs of a tile's columns brought to the L2 cache."""
    n = tl.minimum(column * BLOCK_N + tl.arange(0, BLOCK_N), OUTPUTS - 1)
    BYTES: tl.constexpr = EACH * (w.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.b32 $0, 0;", "=r,l",
        [w + (expert.to(tl.int64) * OUTPUTS + n) * INPUTS], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _pick(values, at, one):
    return tl.sum(tl.where(at == one, values, 0), axis=0)


@triton.jit(do_not_specialize=["most", "rows", "entries"])
def _grouped_gemm(
    x, w, w_lines, out, ids, ends, experts, weights, x_scales, w_scales, biases, most, rows, entries,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr,
    GATHER: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, FLAT: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK_E: tl.constexpr,
    X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, UPCAST: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    GATED: tl.constexpr, ASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """w is a descriptor of w_lines [EXPERTS, 1 or 2 (gate and up), OUTPUTS, INPUTS]; out unless PARTS, and x unless GATHER, of
    [1, rows, columns].

    ends int32 [EXPERTS]: see moe_align. Scales: as in kernels/moe_few.
    PARTS: out [TOPK, rows, OUTPUTS]; experts, weights [rows, TOPK], of which `entries` say what goes nowhere: that has zeros."""
    across: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    each: tl.constexpr = min(INPUTS, (STAGES - 1) * BLOCK_K)
    if PDL:  # noqa: SIM102 (constants of the compiler)
        if not ASKS:
            tl.extra.cuda.gdc_wait()
            if GATE:
                tl.extra.cuda.gdc_launch_dependents()  # not before: what is behind it reads `ends` as soon as it begins
    at = tl.arange(0, BLOCK_E)
    begins = tl.load(ends + at - 1, mask=(at > 0) & (at < EXPERTS), other=0, cache_modifier=".cg")
    end = tl.load(ends + at, mask=at < EXPERTS, other=0, cache_modifier=".cg")
    tiles = tl.where(at < EXPERTS, end - begins, 0)
    spans = (tiles + TILES - 1) // TILES
    until = tl.cumsum(spans, axis=0)
    down = tl.sum(spans, axis=0)
    if ASKS:
        if tl.program_id(0) < down * across:
            span, column = _tile_at(tl.program_id(0), down, across, GROUP)
            expert = tl.sum((until <= span).to(tl.int32), axis=0)
            _ask_for(w_lines, expert, column, OUTPUTS, INPUTS, BLOCK_N, each)
        tl.extra.cuda.gdc_wait()
    if PARTS:
        for entry in tl.range(tl.program_id(0), entries, tl.num_programs(0)):
            if tl.load(experts + entry) < 0:
                line = out + ((entry % TOPK) * rows + entry // TOPK).to(tl.int64) * OUTPUTS
                for begin in tl.range(0, OUTPUTS, BLOCK_N):
                    n = begin + tl.arange(0, BLOCK_N)
                    tl.store(line + n, tl.zeros((BLOCK_N,), out.dtype.element_ty), mask=n < OUTPUTS)
    for nth in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLAT):
        span, column = _tile_at(nth, down, across, GROUP)
        expert = tl.sum((until <= span).to(tl.int32), axis=0)
        if TILES > 1:
            own, several = _pick(tiles, at, expert), _pick(spans, at, expert)
            within = span - _pick(until - spans, at, expert)
            first = within * own // several  # as equal as can be
            count = (within + 1) * own // several - first
            first += _pick(begins, at, expert)
        else:
            first = span
        if TILES == 1:
            _span(
                x, w, out, ids, weights, x_scales, w_scales, biases, most, rows, expert, first, column, 1,
                TOPK, INPUTS, OUTPUTS, GATE, GATHER, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, X_GROUPS, W_GROUPS, UPCAST,
                BIAS, ALPHA, LIMIT, GATED,
            )  # fmt: skip
        else:
            if count == 1:
                _span(
                    x, w, out, ids, weights, x_scales, w_scales, biases, most, rows, expert, first, column, 1,
                    TOPK, INPUTS, OUTPUTS, GATE, GATHER, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, X_GROUPS, W_GROUPS, UPCAST,
                    BIAS, ALPHA, LIMIT, GATED,
                )  # fmt: skip
            elif count == 2:
                _span(
                    x, w, out, ids, weights, x_scales, w_scales, biases, most, rows, expert, first, column, 2,
                    TOPK, INPUTS, OUTPUTS, GATE, GATHER, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, X_GROUPS, W_GROUPS, UPCAST,
                    BIAS, ALPHA, LIMIT, GATED,
                )  # fmt: skip
            elif TILES == 3:
                _span(
                    x, w, out, ids, weights, x_scales, w_scales, biases, most, rows, expert, first, column, 3,
                    TOPK, INPUTS, OUTPUTS, GATE, GATHER, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, X_GROUPS, W_GROUPS, UPCAST,
                    BIAS, ALPHA, LIMIT, GATED,
                )  # fmt: skip
    if PDL:  # noqa: SIM102 (constants of the compiler)
        if not GATE:
            tl.extra.cuda.gdc_launch_dependents()


class Shape(NamedTuple):
    """Sizes of a tile (block_n: of a gate's columns, and as many of up's), warps, stages; programs on each multiprocessor; tiles of an
    expert's rows that a program computes by one reading of the weight, at most (3). apart: by hopper.py, whose tiles have one size."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    flat: bool = False
    programs: int = 1
    tiles: int = 1
    apart: bool = False


Scales = tuple[Tensor | None, Tensor | None]
"""The scales of x and of the weight, where they have 8 bits: see kernels/moe_few."""


class Parts(NamedTuple):
    """Results go to the places of their tokens, weighted: as kernels/moe_few leaves them. Both [m, topk]."""

    experts: Tensor
    weights: Tensor


def _launch(
    x: Tensor, w: Tensor, out: Tensor, shape: Shape, most: int, ends: Tensor, ids: Tensor | None, num_topk: int,
    scales: Scales, *, gate: bool, gather: bool = False, parts: Parts | None = None, asks: bool = False,
    epilogue: Epilogue = PLAIN,
) -> None:  # fmt: skip
    """x [tokens, k] if rows are gathered, else [1, rows, k]; out [1, rows, n]. most: tiles of rows that there
    may be."""
    num_experts, inputs = w.shape[0], w.shape[2]
    halves = 2 if gate and epilogue.gated else 1
    outputs = w.shape[1] // halves
    assert inputs % ALIGNED == outputs % ALIGNED == 0
    block_m, block_n, block_k = shape.block_m, shape.block_n, shape.block_k
    programs = min(most * triton.cdiv(outputs, block_n), shape.programs * pdl.multiprocessors(out.device))
    lines, results = x, out
    if not gather:
        slabs, rows = x.shape[:2]
        lines = TensorDescriptor(x, [slabs, rows, inputs], [rows * inputs, inputs, 1], [1, block_m, block_k])
    if parts is None:
        slabs, rows = out.shape[:2]
        results = TensorDescriptor(out, [slabs, rows, outputs], [rows * outputs, outputs, 1], [1, block_m, block_n])
    _grouped_gemm[(max(1, programs),)](
        lines,
        TensorDescriptor(
            w, [num_experts, halves, outputs, inputs], [halves * outputs * inputs, outputs * inputs, inputs, 1],
            [1, halves, block_n, block_k],
        ),
        w, results, ends if ids is None else ids, ends, ends if parts is None else parts.experts,
        ends if parts is None else parts.weights, *(ends if each is None else each for each in (*scales, epilogue.bias)),
        1 << 30 if gather else x.shape[1], out.shape[1], 0 if parts is None else parts.experts.numel(),
        EXPERTS=num_experts, TOPK=num_topk, INPUTS=inputs, OUTPUTS=outputs, GATE=gate, GATHER=gather,
        PARTS=parts is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=shape.stages,
        FLAT=shape.flat, TILES=shape.tiles, GROUP=GROUP, BLOCK_E=triton.next_power_of_2(num_experts),
        X_GROUPS=0 if scales[0] is None else scales[0].shape[-1], W_GROUPS=0 if scales[1] is None else scales[1].shape[-1],
        UPCAST=not out.is_cuda, BIAS=epilogue.bias is not None, ALPHA=epilogue.alpha, LIMIT=epilogue.limit, GATED=epilogue.gated,
        ASKS=asks and out.is_cuda and pdl.supported(), num_warps=shape.warps, num_stages=shape.stages, **pdl.options(out),
    )  # fmt: skip


def has_apart(w: Tensor) -> bool:
    """Whether hopper.py has been checked on a GPU with weights like these, by this compiler."""
    hopper = w.is_cuda and torch.cuda.get_device_capability(w.device)[0] == 9
    return hopper and w.dtype == torch.bfloat16 and triton.__version__.startswith(CHECKED)


def sorted_gemm(
    x: Tensor, w: Tensor, out: Tensor, shape: Shape, ends: Tensor, ids: Tensor | None = None, num_topk: int = 1,
    entries: int = 0, scales: "Scales" = (None, None), *, gate: bool = False, parts: Parts | None = None, asks: bool = False,
    owners: Tensor | None = None, epilogue: Epilogue = PLAIN,
) -> Tensor:  # fmt: skip
    """x [tokens, k] with ids of entries, or [rows, k] in their order; w [experts, n, k] (gate: [experts, 2 n, k]); out [rows, n].

    ends, ids: as moe_align gives them for tiles of shape.block_m. entries: of them there are so many at most.
    parts: x is in the order of ids, out [topk, tokens, n] in that of tokens. asks: it comes behind the gate's product, so `ends` is
    there before that is done, and the first weights are asked for meanwhile. owners: as moe_align gives them, where shape.apart."""
    if shape.apart:
        from meshlm.kernels.grouped_gemm import hopper

        assert owners is not None and parts is None and scales == (None, None) and epilogue is PLAIN  # noqa: PT018
        hopper.sorted_gemm(x, w, out, shape.stages, ends, owners, ids, num_topk, gate=gate)
        return out
    most = most_tiles(entries, w.shape[0], shape.block_m) if entries else out.shape[0] // shape.block_m
    gather = ids is not None and parts is None
    _launch(
        x if gather else x[None], w, out if parts else out[None], shape, most, ends, ids, num_topk, scales,
        gate=gate, gather=gather, parts=parts, asks=asks, epilogue=epilogue,
    )  # fmt: skip
    return out
