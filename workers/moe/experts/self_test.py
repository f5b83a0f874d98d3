"""Kernels of experts with biases, another activation than silu, no gate or packed weights are used where this very GPU shows, at each
start, that they give what plain torch gives: one row, few and many, with rows that go nowhere.

What is wrong, or cannot be compiled or launched, is said in words; weights are decoded then, or plain torch computes.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import structlog
import torch
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.kernels.packed_experts import plan
from meshlm.kernels.packed_experts.layout import MXFP4, ExpertWeight, Format
from meshlm.kernels.packed_experts.runs import random_weight
from meshlm.kernels.self_test import Result, why_wrong
from meshlm.workers.formats.expert_codes import packed_experts
from meshlm.workers.formats.format import GroupedWeight, plain_experts
from meshlm.workers.moe import fused_moe
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.packed import PackedExperts
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.experts.triton import TritonExperts

EXPERTS, TOPK, HIDDEN, WIDE = 32, 4, 352, 224  # eleven groups of MXFP4, and seven
ROWS = (1, 10, 40, 200, 600, 2000)  # that meet each height of a tile
DIRECT = {1: (0, 1, 4, 3, 1, 2, 2), 3: (0, 2, 2, 1, 2, 4, 1), 40: (16, 2, 2, 1, 0, 0, 0), 300: (32, 2, 4, 1, 2, 2, 1)}
"""Plans of kernels/packed_experts/direct.py that are tested, by rows."""
NEAR = 0.05  # of a row's norm: rounding to 16 bits makes 0.01 of it
SWIGLU = 1.702, 1.0
_log = structlog.get_logger()
Pair = tuple[fused_moe.Experts, fused_moe.Experts]  # in plain torch, and by kernels


@cache
def of_packed(dtype: torch.dtype, device: torch.device, format: Format = MXFP4) -> str:
    """Why the kernels must not be used for packed weights of this format, with activations of this dtype; "" when they may be."""
    return _reason(lambda: _of_packed(dtype, device, format), dtype, device)


@cache
def of_extras(dtype: torch.dtype, device: torch.device, act: str = "silu") -> str:
    """The same for weights of this dtype with biases and a clamped activation, or with another activation than silu: UNGATED_ACT is of
    experts without a gate."""
    return _reason(lambda: _of_extras(dtype, device, act), dtype, device)


def may_be_direct(given: fused_moe.ExpertWeights) -> bool:
    """Whether packed_experts/direct.py may compute with these weights, where a table or the tuner says that it is faster. Where one
    says so already, it is tested; the tuner tests what it measures. Waits for the device."""
    dtype, device = given.down.dtype, given.down.device
    weights = [one.kernel for one in (given.gate_up, given.down) if isinstance(one.kernel, ExpertWeight)]
    if device.type != "cuda" or not all(plan.takes(weight, dtype) for weight in weights):
        return False
    return not tables.products(plan.OP) or all(_is_direct_right(device, dtype, weight.format) for weight in weights)


@cache
def _is_direct_right(device: torch.device, dtype: torch.dtype = torch.bfloat16, format: Format = MXFP4) -> bool:
    reason = _why_wrong(_error(_of_direct(dtype, device, format), rows, dtype, device) for rows in DIRECT)
    if reason:
        _log.warning("kernels of a few rows of packed experts are not used", format=format.name, reason=reason)
    return not reason


def _reason(make: Callable[[], Pair], dtype: torch.dtype, device: torch.device) -> str:
    def errors() -> Iterator[float]:
        pair = make()
        yield from (_error(pair, rows, dtype, device) for rows in ROWS)

    return _why_wrong(errors())


def _why_wrong(errors: Iterable[float]) -> str:
    results = (Result("are", error, NEAR, "of a row's norm away from plain torch") for error in errors)
    why = why_wrong(results)
    return f"on this GPU the kernels {why if why.startswith('are ') else f'fail: {why}'}" if why else ""


def _error(pair: Pair, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """The largest distance of a row; infinity for what is not a number."""
    random = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=random, dtype=torch.float32, device=device).to(dtype)
    scores = torch.randn(rows, EXPERTS, generator=random, dtype=torch.float32, device=device)
    slots = torch.arange(rows, device=device)
    slots[1::5] = -1
    routing = fused_moe.Routing(*select_experts(scores, Rule(TOPK, renormalise=True), None, slots))
    wanted, found = (_sums(experts, x, routing) for experts in pair)
    error = float((found - wanted).norm(dim=1).max() / wanted.norm(dim=1).mean())
    return error if error == error else float("inf")


def _sums(experts: fused_moe.Experts, x: Tensor, routing: fused_moe.Routing) -> Tensor:
    """float32 [m, hidden]."""
    dispatcher = NoDispatch(0, EXPERTS, EXPERTS, finishes=frozenset(fused_moe.WeightAndReduce))
    value = fused_moe.FusedMoE(dispatcher, experts).forward(x, routing)[0].value
    return (value.sum(0) if value.dim() == 3 else value).float()


def _extras(dtype: torch.dtype, random: torch.Generator) -> fused_moe.ExpertExtras:
    above, below = (
        torch.randn(EXPERTS, outputs, generator=random, device=random.device).to(dtype)
        for outputs in (2 * WIDE, HIDDEN)
    )
    return fused_moe.ExpertExtras(above, below, SWIGLU)


class _Direct(PackedExperts):
    """By kernels/packed_experts/direct.py, whatever is faster."""

    def plan(self, rows: int, num_topk: int) -> plan.Plan:
        return plan.decoded(DIRECT[rows], self._kind)


def _of_direct(dtype: torch.dtype, device: torch.device, format: Format) -> Pair:
    given = _packed(dtype, device, format)
    return ReferenceExperts(given), _Direct(given)


def _packed(dtype: torch.dtype, device: torch.device, format: Format) -> fused_moe.ExpertWeights:
    random = torch.Generator(device).manual_seed(1)

    def weight(outputs: int, inputs: int) -> GroupedWeight:
        return packed_experts(random_weight(EXPERTS, outputs, inputs, device, random, format), dtype)

    return fused_moe.ExpertWeights(weight(2 * WIDE, HIDDEN), weight(HIDDEN, WIDE), extras=_extras(dtype, random))


def _of_packed(dtype: torch.dtype, device: torch.device, format: Format) -> Pair:
    given = _packed(dtype, device, format)
    return ReferenceExperts(given), PackedExperts(given)


def _of_extras(dtype: torch.dtype, device: torch.device, act: str) -> Pair:
    random = torch.Generator(device).manual_seed(1)

    def weight(outputs: int, inputs: int) -> GroupedWeight:
        made: Tensor = torch.randn(EXPERTS, outputs, inputs, generator=random, device=device) / inputs**0.5
        return plain_experts(made.to(dtype))

    gated = act != fused_moe.UNGATED_ACT
    gate_up, down = weight((2 if gated else 1) * WIDE, HIDDEN), weight(HIDDEN, WIDE)
    weights = fused_moe.ExpertWeights(gate_up, down, act, _extras(dtype, random) if act == "silu" else None, gated)
    return ReferenceExperts(weights), TritonExperts(weights)
