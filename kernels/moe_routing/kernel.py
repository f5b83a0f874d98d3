"""Which experts a token goes to (see reference.py for the formula): one program a token, everything in registers.

The k best come one after the other, each the largest of what is left; of equals the one with the smaller number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.moe_routing.reference import Rule

LEAST = tl.constexpr(-3.0e38)


@triton.jit
def _key(value, at, LAST: tl.constexpr):
    """int64 that orders as (value, -at) does, for float32: one maximum finds both."""
    bits = value.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) << 32) | (LAST - at).to(tl.int64)


@triton.jit
def _value(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _of_good_groups(
    choice, at, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr
):  # fmt: skip
    """LEAST for experts of groups that are not among the best."""
    real = at < EXPERTS
    group = at // (EXPERTS // GROUPS)
    allowed = at < 0
    left = choice * 0.0  # by expert: its group's score
    for one in tl.static_range(GROUPS):
        mine = tl.where(real & (group == one), choice, LEAST)
        score = tl.max(mine, axis=0)
        if TOP2:
            second = tl.where(at == tl.argmax(mine, axis=0), LEAST, mine)
            score += tl.max(second, axis=0)
        left = tl.where(group == one, score, left)
    left = tl.where(real, left, LEAST)
    for _ in tl.static_range(TOPK_GROUPS):
        found = group == tl.min(tl.where(left == tl.max(left, axis=0), group, GROUPS), axis=0)
        allowed = allowed | found
        left = tl.where(found, LEAST, left)
    return tl.where(allowed, choice, LEAST)


@triton.jit
def best_experts(
    logits, correction, at, experts, weights, padding,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr, CORRECTED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """logits float32 [BLOCK_E], -inf behind the last expert; `at`: arange(BLOCK_E). Stores TOPK of experts and weights.

    Logits order experts as their softmax does, which is found of the chosen ones alone where nothing else is needed."""
    real = at < EXPERTS
    plain: tl.constexpr = not (SIGMOID or CORRECTED or TOP2)
    if plain:
        scores = logits
    elif SIGMOID:
        scores = tl.where(real, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    else:
        exponents = tl.where(real, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
        scores = exponents / tl.sum(exponents, axis=0)
    choice = scores
    if CORRECTED:
        choice += tl.load(correction + at, mask=real, other=0.0).to(tl.float32)
    choice = tl.where(real, choice, LEAST)
    if GROUPS > 1:
        choice = _of_good_groups(choice, at, EXPERTS, GROUPS, TOPK_GROUPS, TOP2)
    keys = _key(choice, at, BLOCK_E - 1)
    nth = tl.arange(0, BLOCK_K)
    chosen, kept = tl.zeros((BLOCK_K,), tl.int32), tl.full((BLOCK_K,), float("-inf") if plain else 0.0, tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
        expert = BLOCK_E - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(nth == k, expert, chosen)
        if CORRECTED:
            kept = tl.where(nth == k, tl.sum(tl.where(at == expert, scores, 0.0), axis=0), kept)
        else:
            kept = tl.where(nth == k, _value(best), kept)
    if plain:
        largest = tl.max(kept, axis=0)
        kept = tl.exp(kept - largest)
        if not RENORMALISE:
            kept /= tl.sum(tl.where(real, tl.exp(logits - largest), 0.0), axis=0)
    if RENORMALISE:
        kept /= tl.sum(kept, axis=0)
    kept *= SCALING
    tl.store(experts + nth, tl.where(padding, -1, chosen), mask=nth < TOPK)
    tl.store(weights + nth, tl.where(padding, 0.0, kept), mask=nth < TOPK)


@triton.jit
def _select_experts(
    logits, correction, slots, experts, weights, stride, SPLITS: tl.constexpr,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr, CORRECTED: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_E)
    if SPLITS:
        line = tl.where(at < EXPERTS, 0.0, float("-inf"))
        for split in tl.static_range(SPLITS):
            place = (split * tl.num_programs(0) + token) * stride + at
            line += tl.load(logits + place, mask=at < EXPERTS, other=0.0)
    else:
        line = tl.load(logits + token * stride + at, mask=at < EXPERTS, other=float("-inf")).to(tl.float32)
    padding = False
    if SLOTS:
        padding = tl.load(slots + token) < 0
    best_experts(
        line, correction, at, experts + token * TOPK, weights + token * TOPK, padding,
        EXPERTS, TOPK, SIGMOID, RENORMALISE, SCALING, GROUPS, TOPK_GROUPS, TOP2, CORRECTED, BLOCK_E, BLOCK_K,
    )  # fmt: skip


def constants(rule: Rule, num_experts: int) -> dict[str, int | float | bool]:
    """The rule, as kernels are compiled for it."""
    return {
        "EXPERTS": num_experts,
        "TOPK": rule.num_topk,
        "SIGMOID": rule.sigmoid,
        "RENORMALISE": rule.renormalise,
        "SCALING": rule.scaling,
        "GROUPS": rule.num_groups,
        "TOPK_GROUPS": rule.topk_groups,
        "TOP2": rule.top2_groups,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_K": triton.next_power_of_2(rule.num_topk),
    }


def select_experts(
    logits: Tensor, rule: Rule, correction_bias: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's experts and weights. logits [m, experts], rows may be strided; or dense float32 parts of a sum [s, m, experts]."""
    tokens, num_experts = logits.shape[-2:]
    experts = torch.empty(tokens, rule.num_topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, rule.num_topk, dtype=torch.float32, device=logits.device)
    _select_experts[(tokens,)](
        logits, logits if correction_bias is None else correction_bias, logits if slots is None else slots, experts, weights,
        logits.stride(-2), logits.shape[0] if logits.dim() == 3 else 0, **constants(rule, num_experts),
        CORRECTED=correction_bias is not None, SLOTS=slots is not None,
        num_warps=1, **pdl.options(logits),
    )  # fmt: skip
    return experts, weights
