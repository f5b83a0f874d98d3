"""Products of few rows (up to a tile's) with the weights of their experts: each expert that is touched is read once.

    gate   out[t k + j] = silu(x[t] W_gate[e]^T) * (x[t] W_up[e]^T)       e: the jth expert of token t
    down   out[j, t]    = weight[t, j] (x[t k + j] W[e]^T)                float32: the norm behind adds up the k parts

Nothing is sorted: a program computes one expert's columns for all tokens, of which those that do not go there are zeros. With fewer
entries than experts a program belongs to an entry and the first entry of an expert computes it; else to an expert.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit(do_not_specialize=["rows"])
def _few(
    x, w, experts, weights, out, rows,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr,
    BY_ENTRY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lead = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    inside = n < OUTPUTS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if BY_ENTRY:
        expert = tl.load(experts + lead)
    else:
        expert = lead
    entry = tl.full((BLOCK_M,), -1, tl.int32)
    for j in tl.static_range(TOPK):
        one = tl.load(experts + m * TOPK + j, mask=m < rows, other=-1)
        entry = tl.where((one == expert) & (one >= 0), m * TOPK + j, entry)
        if not GATE:  # what goes nowhere adds nothing: the first program of its columns says so
            nowhere = (m < rows) & (one < 0) & (m * 0 + lead == 0)
            nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            place = out + (j * rows + m)[:, None].to(tl.int64) * OUTPUTS + n[None, :]
            tl.store(place, nothing, mask=nowhere[:, None] & inside[None, :])
    real = entry >= 0
    first = tl.min(tl.where(real, entry, 0x7FFFFFFF), axis=0)
    if BY_ENTRY:
        live = (first == lead).to(tl.int32)
    else:
        live = (first != 0x7FFFFFFF).to(tl.int32)
    if live == 1:
        if GATE:
            line = x + m[:, None].to(tl.int64) * INPUTS
        else:
            line = x + tl.where(real, entry, 0)[:, None].to(tl.int64) * INPUTS
        halves: tl.constexpr = 2 if GATE else 1
        weight = w + expert.to(tl.int64) * (halves * OUTPUTS * INPUTS) + n[:, None].to(tl.int64) * INPUTS
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
            k = begin + tl.arange(0, BLOCK_K)
            whole: tl.constexpr = (INPUTS % BLOCK_K == 0) and (OUTPUTS % BLOCK_N == 0)
            y = tl.load(line + k[None, :], mask=real[:, None] & (k < INPUTS)[None, :], other=0.0)
            if whole:
                result = tl.dot(y, tl.load(weight + k[None, :]).T, result)
                if GATE:
                    up = tl.dot(y, tl.load(weight + OUTPUTS * INPUTS + k[None, :]).T, up)
            else:
                there = inside[:, None] & (k < INPUTS)[None, :]
                result = tl.dot(y, tl.load(weight + k[None, :], mask=there, other=0.0).T, result)
                if GATE:
                    up = tl.dot(y, tl.load(weight + OUTPUTS * INPUTS + k[None, :], mask=there, other=0.0).T, up)
        mask = real[:, None] & inside[None, :]
        if GATE:
            dtype = out.dtype.element_ty
            result = result.to(dtype).to(tl.float32)
            result = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
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


def few(x: Tensor, w: Tensor, experts: Tensor, weights: Tensor | None, out: Tensor, shape: Shape) -> Tensor:
    """gate (no weights): x [m, k], w [experts, 2 n, k] -> out [m topk, n]. down: x [m topk, k], w [experts, n, k] -> [topk, m, n].

    experts int32 [m, topk], -1 goes nowhere; out of a gate is float of x's dtype, of down float32.
    """
    (rows, num_topk), num_experts, inputs = experts.shape, w.shape[0], w.shape[2]
    gate = weights is None
    outputs = w.shape[1] // 2 if gate else w.shape[1]
    assert rows <= MOST_ROWS
    by_entry = experts.numel() <= num_experts
    use_pdl = x.is_cuda and pdl.supported()
    _few[(triton.cdiv(outputs, shape.block_n), experts.numel() if by_entry else num_experts)](
        x, w, experts, experts if weights is None else weights, out, rows,
        EXPERTS=num_experts, TOPK=num_topk, INPUTS=inputs, OUTPUTS=outputs, GATE=gate, BY_ENTRY=by_entry,
        BLOCK_M=max(LEAST_ROWS, triton.next_power_of_2(rows)), BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        STAGES=shape.stages, PDL=use_pdl, num_warps=shape.warps, num_stages=shape.stages,
        **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out
