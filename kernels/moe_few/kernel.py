"""Products of few rows (up to a tile's) with the weights of their experts: each expert that is touched is read once.

    gate   out[t k + j] = silu(x[t] W_gate[e]^T) * (x[t] W_up[e]^T)       e: the jth expert of token t; GATED, else relu(x[t] W[e]^T)^2
    down   out[j, t]    = weight[t, j] (x[t k + j] W[e]^T)                float32: the norm behind adds up the k parts

A bias may be added to each product, and the gate's activation may be another (kernels/moe_epilogue). Nothing is sorted: a program
computes one expert's columns for all tokens, of which those that do not go there are zeros. With fewer entries than experts a program
belongs to an entry and the first entry of an expert computes it; else to an expert.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue, activated, squared_relu


@triton.jit
def part(y, tile, UPCAST: tl.constexpr):
    """y tile^T where the tile has 8 bits: of floats in them, if y is too, of integers exactly, else in y's type. UPCAST: for who cannot
    multiply them."""
    if UPCAST:
        return tl.dot(y.to(tl.float32), tile.to(tl.float32).T)
    elif y.dtype == tl.int8:
        return tl.dot(y, tile.T).to(tl.float32)
    else:
        return tl.dot(y, tile.to(y.dtype).T)


@triton.jit
def entries_of(
    experts, out, lead, n, rows,
    TOPK: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr, BY_ENTRY: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The expert of a program that computes columns n, the entries [BLOCK_M] of the rows that go to it (-1: a row does not), and 1 if
    this program has to compute them, else 0. What goes nowhere adds nothing to a down: the first program of its columns says so."""
    m = tl.arange(0, BLOCK_M)
    if BY_ENTRY:
        expert = tl.load(experts + lead)
    else:
        expert = lead
    entry = tl.full((BLOCK_M,), -1, tl.int32)
    for j in tl.static_range(TOPK):
        one = tl.load(experts + m * TOPK + j, mask=m < rows, other=-1)
        entry = tl.where((one == expert) & (one >= 0), m * TOPK + j, entry)
        if not GATE:
            nowhere = (m < rows) & (one < 0) & (m * 0 + lead == 0)
            nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            place = out + (j * rows + m)[:, None].to(tl.int64) * OUTPUTS + n[None, :]
            tl.store(place, nothing, mask=nowhere[:, None] & (n < OUTPUTS)[None, :])
    first = tl.min(tl.where(entry >= 0, entry, 0x7FFFFFFF), axis=0)
    if BY_ENTRY:
        live = (first == lead).to(tl.int32)
    else:
        live = (first != 0x7FFFFFFF).to(tl.int32)
    return expert, entry, live


@triton.jit(do_not_specialize=["rows"])
def _few(
    x, w, experts, weights, out, x_scales, w_scales, bias, rows,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr,
    BY_ENTRY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, UPCAST: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """X_GROUPS, W_GROUPS: scales of a row of x and of the weight; 0: it has none. More than one: each of BLOCK_K columns."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lead = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    inside = n < OUTPUTS
    pdl.follow(PDL)
    expert, entry, live = entries_of(
        experts, out, lead, n, rows, TOPK, OUTPUTS, GATE, BY_ENTRY, BLOCK_M, BLOCK_N
    )  # fmt: skip
    real = entry >= 0
    if live == 1:
        if GATE:
            line = x + m[:, None].to(tl.int64) * INPUTS
            x_scale = x_scales + m * X_GROUPS
        else:
            line = x + tl.where(real, entry, 0)[:, None].to(tl.int64) * INPUTS
            x_scale = x_scales + tl.where(real, entry, 0) * X_GROUPS
        halves: tl.constexpr = 2 if GATE and GATED else 1
        weight = w + expert.to(tl.int64) * (halves * OUTPUTS * INPUTS) + n[:, None].to(tl.int64) * INPUTS
        w_scale = w_scales + (expert.to(tl.int64) * (halves * OUTPUTS) + n) * W_GROUPS
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
            k = begin + tl.arange(0, BLOCK_K)
            whole: tl.constexpr = (INPUTS % BLOCK_K == 0) and (OUTPUTS % BLOCK_N == 0)
            y = tl.load(line + k[None, :], mask=real[:, None] & (k < INPUTS)[None, :], other=0.0)
            if whole:
                tile = tl.load(weight + k[None, :])
            else:
                tile = tl.load(weight + k[None, :], mask=inside[:, None] & (k < INPUTS)[None, :], other=0.0)
            if halves == 2:
                if whole:
                    tile_up = tl.load(weight + OUTPUTS * INPUTS + k[None, :])
                else:
                    there = inside[:, None] & (k < INPUTS)[None, :]
                    tile_up = tl.load(weight + OUTPUTS * INPUTS + k[None, :], mask=there, other=0.0)
            if W_GROUPS > 1:
                group = begin // BLOCK_K
                scale = tl.load(w_scale + group, mask=inside, other=0.0)[None, :]
                if X_GROUPS > 1:
                    scale = scale * tl.load(x_scale + group, mask=real, other=0.0)[:, None]
                result += part(y, tile, UPCAST) * scale
                if halves == 2:
                    scale = tl.load(w_scale + OUTPUTS * W_GROUPS + group, mask=inside, other=0.0)[None, :]
                    if X_GROUPS > 1:
                        scale = scale * tl.load(x_scale + group, mask=real, other=0.0)[:, None]
                    up += part(y, tile_up, UPCAST) * scale
            elif W_GROUPS == 1:
                result += part(y, tile, UPCAST)
                if halves == 2:
                    up += part(y, tile_up, UPCAST)
            else:
                result = tl.dot(y, tile.T, result)
                if halves == 2:
                    up = tl.dot(y, tile_up.T, up)
        if W_GROUPS == 1:
            result *= tl.load(w_scale, mask=inside, other=0.0)[None, :]
            if halves == 2:
                up *= tl.load(w_scale + OUTPUTS, mask=inside, other=0.0)[None, :]
        if X_GROUPS == 1:
            own = tl.load(x_scale, mask=real, other=0.0)[:, None]
            result *= own
            up *= own
        if BIAS:
            b = bias + expert.to(tl.int64) * (halves * OUTPUTS) + n
            result += tl.load(b, mask=inside, other=0.0).to(tl.float32)[None, :]
            if halves == 2:
                up += tl.load(b + OUTPUTS, mask=inside, other=0.0).to(tl.float32)[None, :]
        mask = real[:, None] & inside[None, :]
        if GATE:
            dtype = out.dtype.element_ty
            if GATED:
                result = activated(result, up, dtype, ALPHA, LIMIT)
            else:
                result = squared_relu(result, dtype)
            tl.store(out + entry[:, None].to(tl.int64) * OUTPUTS + n[None, :], result.to(dtype), mask=mask)
        else:
            result *= tl.load(weights + entry, mask=real, other=0.0)[:, None]
            row = (entry % TOPK) * rows + m
            tl.store(out + row[:, None].to(tl.int64) * OUTPUTS + n[None, :], result, mask=mask)


class Shape(NamedTuple):
    """Sizes of a tile (block_n: of a gate's columns, and as many of up's), warps, stages."""

    block_n: int
    block_k: int
    warps: int
    stages: int


LEAST_ROWS, MOST_ROWS = 16, 64  # of a tile


def few(
    x: Tensor, w: Tensor, experts: Tensor, weights: Tensor | None, out: Tensor, shape: Shape,
    x_scales: Tensor | None = None, w_scales: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
) -> Tensor:  # fmt: skip
    """gate (no weights): x [m, k], w [experts, 2 n, k] -> out [m topk, n]. down: x [m topk, k], w [experts, n, k] -> [topk, m, n].

    Without a gate (the epilogue says so) w is [experts, n, k] of either.
    experts int32 [m, topk], -1 goes nowhere; out of a gate is of 16 bits, of down float32. Scales: of weights of 8 bits, float32
    [rows of x, groups] and [experts, outputs, groups]; with more than one group BLOCK_K is a group."""
    (rows, num_topk), num_experts, inputs = experts.shape, w.shape[0], w.shape[2]
    gate = weights is None
    outputs = w.shape[1] // 2 if gate and epilogue.gated else w.shape[1]
    assert rows <= MOST_ROWS
    by_entry = experts.numel() <= num_experts
    _few[(triton.cdiv(outputs, shape.block_n), experts.numel() if by_entry else num_experts)](
        x, w, experts, experts if weights is None else weights, out, x if x_scales is None else x_scales,
        x if w_scales is None else w_scales, x if epilogue.bias is None else epilogue.bias, rows,
        EXPERTS=num_experts, TOPK=num_topk, INPUTS=inputs, OUTPUTS=outputs, GATE=gate, BY_ENTRY=by_entry,
        BLOCK_M=max(LEAST_ROWS, triton.next_power_of_2(rows)), BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        STAGES=shape.stages, X_GROUPS=0 if x_scales is None else x_scales.shape[-1],
        W_GROUPS=0 if w_scales is None else w_scales.shape[-1], UPCAST=not x.is_cuda, BIAS=epilogue.bias is not None,
        ALPHA=epilogue.alpha, LIMIT=epilogue.limit, GATED=epilogue.gated, num_warps=shape.warps, num_stages=shape.stages,
        **pdl.options(x),
    )  # fmt: skip
    return out
