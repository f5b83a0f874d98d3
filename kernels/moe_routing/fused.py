"""Few rows: the norm, the router's product and the choice of experts in one kernel.

    h = x + residual (x may be parts of a sum);  y = norm(h);  logits = y W^T;  experts, weights as kernel.py chooses them

A program computes some experts' logits of one token; the last one that is done chooses. Weights of the router are asked for while the
kernel before still runs (PDL). Logits stay in float32; the rest is rounded where the unfused operations round.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.moe_routing.kernel import best_experts, constants
from meshlm.kernels.moe_routing.reference import Rule

MOST_ROWS, MOST_INPUTS = 16, 8192  # each program reads its whole row: more rows are cheaper one after the other
EACH = 2  # experts of a program: as few as keep its sums, and the choice, within a warp or two


@triton.jit(do_not_specialize=["rows"])
def _norm_route(
    x, residual, norm_weight, w, correction, slots, y, stream, logits, counters, experts, weights, rows, eps,
    HIDDEN: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr, SLOTS: tl.constexpr, BLOCK_H: tl.constexpr, EACH: tl.constexpr,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SPLITS: x is float32 [SPLITS, rows, HIDDEN]; 0: [rows, HIDDEN]. counters: zeros, and zeros again afterwards."""
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_H)
    inside = k < HIDDEN
    one = block * EACH + tl.arange(0, EACH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.load(w + one[:, None] * HIDDEN + k[None, :], mask=(one < EXPERTS)[:, None] & inside[None, :], other=0.0)
    scale = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    dtype = y.dtype.element_ty
    if SPLITS:
        line = tl.zeros((BLOCK_H,), tl.float32)
        for split in tl.static_range(SPLITS):
            line += tl.load(x + (split * rows + token) * HIDDEN + k, mask=inside, other=0.0)
        line = line.to(dtype).to(tl.float32)
    else:
        line = tl.load(x + token * HIDDEN + k, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        line += tl.load(residual + token * HIDDEN + k, mask=inside, other=0.0).to(tl.float32)
        line = line.to(dtype).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(line * line, axis=0) / HIDDEN + eps)
    normed = (line * inverse * scale).to(dtype)
    if block == 0:
        tl.store(y + token * HIDDEN + k, normed, mask=inside)
        if ADD:
            tl.store(stream + token * HIDDEN + k, line.to(dtype), mask=inside)
    result = tl.sum(tile.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
    tl.store(logits + token * EXPERTS + one, result, mask=one < EXPERTS)
    tl.debug_barrier()  # all of it is stored
    if tl.atomic_add(counters + token, 1) == tl.num_programs(0) - 1:
        at = tl.arange(0, BLOCK_E)
        whole = tl.load(logits + token * EXPERTS + at, mask=at < EXPERTS, other=float("-inf"), cache_modifier=".cg")
        padding = False
        if SLOTS:
            padding = tl.load(slots + token) < 0
        best_experts(
            whole, correction, at, experts + token * TOPK, weights + token * TOPK, padding,
            EXPERTS, TOPK, SIGMOID, RENORMALISE, SCALING, GROUPS, TOPK_GROUPS, TOP2, CORRECTED, BLOCK_E, BLOCK_K,
        )  # fmt: skip
        tl.store(counters + token, 0)


@cache
def _counters(device: torch.device) -> Tensor:
    """The counters of a device, on one stream: kernels that use them follow one another."""
    return torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)


def takes(x: Tensor) -> bool:
    """Whether this kernel is for so many rows, or parts of them."""
    rows, hidden = x.shape[-2:]
    return rows * (x.shape[0] if x.dim() == 3 else 1) <= MOST_ROWS and hidden <= MOST_INPUTS


def norm_route(
    x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], w: Tensor, rule: Rule,
    correction_bias: Tensor | None = None, slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [m, k], or float32 parts [s, m, k] that have a residual; w [experts, k] -> y, the residual with x in it, experts, weights."""
    rows, hidden = x.shape[-2:]
    num_experts, parts = w.shape[0], x.dim() == 3
    y = torch.empty(rows, hidden, dtype=w.dtype, device=w.device)
    stream = x if residual is None else torch.empty_like(residual)
    assert residual is not None or not parts
    logits = torch.empty(rows, num_experts, dtype=torch.float32, device=w.device)
    experts = torch.empty(rows, rule.num_topk, dtype=torch.int32, device=w.device)
    weights = torch.empty(rows, rule.num_topk, dtype=torch.float32, device=w.device)
    _norm_route[(triton.cdiv(num_experts, EACH), rows)](
        x, x if residual is None else residual, norm[0], w, w if correction_bias is None else correction_bias,
        w if slots is None else slots, y, stream, logits, _counters(w.device), experts, weights, rows, norm[1],
        HIDDEN=hidden, SPLITS=x.shape[0] if parts else 0, ADD=residual is not None, SLOTS=slots is not None,
        BLOCK_H=triton.next_power_of_2(hidden), EACH=EACH, **constants(rule, num_experts),
        CORRECTED=correction_bias is not None, num_warps=max(1, min(8, hidden // 2048)), **pdl.options(w),
    )  # fmt: skip
    return y, stream, experts, weights
