"""Experts by Triton's kernels. One row, few rows and many rows go different ways (kernels/grouped_gemm/plan.py).

Weights of 8 bits are multiplied as they are: with activations of 8 bits too, or floats with activations that stay as they are.
"""

import torch
from torch import Tensor

from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.kernels.grouped_gemm import kernel as many
from meshlm.kernels.grouped_gemm.plan import Layer, Plan, fp8_plan, leaves_parts, plan_for, warm_rows, warm_rows_of
from meshlm.kernels.moe_align.kernel import align, most_tiles
from meshlm.kernels.moe_epilogue.kernel import GELU_ALPHA, PLAIN, Epilogue
from meshlm.kernels.moe_few import kernel as few
from meshlm.kernels.moe_gemv import kernel as one
from meshlm.kernels.moe_sum.kernel import sum_parts, weighted_sum
from meshlm.kernels.quantise_fp8.kernel import quantise
from meshlm.kernels.quantise_int8.kernel import quantise as quantise_int8
from meshlm.kernels.quantise_int8.reference import Int8Weight
from meshlm.workers.formats.format import GroupedWeight
from meshlm.workers.moe.fused_moe import (
    Dispatched,
    ExpertExtras,
    ExpertWeights,
    Quantisation,
    WeightAndReduce,
    WorkspaceShape,
)

ALPHAS = {"silu": 0.0, "gelu_pytorch_tanh": GELU_ALPHA}
"""Of the registry's ACTS."""


def epilogues(extras: ExpertExtras | None, act: str = "silu", *, gated: bool = True) -> tuple[Epilogue, Epilogue]:
    """The epilogues behind the products of gate and up, and behind that of down. act: one of ALPHAS, unless the extras have their own;
    without a gate UNGATED_ACT."""
    if not gated:
        assert extras is None
        return Epilogue(gated=False), PLAIN
    alpha, limit = ALPHAS.get(act, 0.0), 0.0
    if extras is None:
        return (Epilogue(alpha=alpha) if alpha else PLAIN), PLAIN
    if extras.swiglu is not None:
        alpha, limit = extras.swiglu
    return Epilogue(extras.gate_up_bias, alpha, limit), Epilogue(extras.down_bias)


def quantisation_of(weight: Fp8Weight | Int8Weight | None) -> Quantisation:
    """The form of activations that experts of such a weight want."""
    if isinstance(weight, Int8Weight):
        return Quantisation.INT8_TOKEN
    if weight is None or weight.rounded is None:
        return Quantisation.NONE
    return Quantisation.FP8_GROUP if weight.rounded else Quantisation.FP8_TOKEN


def _quantised(x: Tensor, weight: Fp8Weight | Int8Weight | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, Int8Weight):
        return quantise_int8(x, True, weight.input_scale)[:2]
    return (x, None) if weight is None or weight.rounded is None else quantise(x, weight.rounded, weight.input_scale)


def _codes(given: GroupedWeight) -> tuple[Tensor, Tensor | None]:
    """A weight of 16 bits, or the codes and scales of one of 8."""
    weight = given.kernel
    if isinstance(weight, Fp8Weight | Int8Weight):
        return weight.codes, weight.scales
    assert isinstance(weight, Tensor)
    return weight, None


class _Weights:
    """A layer holds gate_up [local experts, 2 wide, hidden], down [local experts, hidden, wide], of 16 bits or with scales. Without
    a gate gate_up is [local experts, wide, hidden]."""

    def __init__(self, given: ExpertWeights, fixed: Plan | None) -> None:
        self.fixed = fixed
        self.gate_epilogue, self.down_epilogue = epilogues(given.extras, given.act, gated=given.gated)
        self._gated = given.gated
        plain = self.gate_epilogue is PLAIN and self.down_epilogue is PLAIN
        self._one_row = plain
        self._gate_up8, self._down8 = (
            one.kernel if isinstance(one.kernel, Fp8Weight | Int8Weight) else None
            for one in (given.gate_up, given.down)
        )
        self.gate_up, self.gate_up_scale = _codes(given.gate_up)
        self.down, self.down_scale = _codes(given.down)
        self.dtype = given.down.dtype
        self._apart = many.has_apart(self.down) and plain
        self.num_experts, self.hidden, self.wide = given.down.shape
        eight_bits = self._down8
        group = eight_bits.group if isinstance(eight_bits, Fp8Weight) else 0
        self.block_k = 0 if eight_bits is None else group or 128  # of tiles; 0: any
        self.quantisation = quantisation_of(eight_bits)

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [m, hidden] as the first product wants it, and its scales."""
        return _quantised(x, self._gate_up8)

    def quantised_inner(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return _quantised(x, self._down8)

    def plan(self, rows: int, num_topk: int) -> Plan:
        layer = Layer(self.num_experts, num_topk, self.hidden, self.wide)
        if self.fixed is not None:
            found = self.fixed
        elif self.block_k:
            found = fp8_plan(rows, layer, self.block_k)
        else:
            found = plan_for(rows, layer, apart=self._apart, one_row=self._one_row)
        return found._replace(gate=found.gate._replace(block_n=self.columns(found.gate.block_n)))

    def columns(self, of_gate: int) -> int:
        """The columns of the first product's tile: without a gate it has as many lines of the weight as gate and up have together."""
        return of_gate if self._gated else 2 * of_gate

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        if self.fixed is not None:
            return warm_rows_of(num_topk, most)
        layer = Layer(self.num_experts, num_topk, self.hidden, self.wide)
        return warm_rows(layer, most, self.block_k, apart=self._apart, one_row=self._one_row)


class TritonExperts:
    name = "triton"

    def __init__(self, given: ExpertWeights, fixed: Plan | None = None) -> None:
        """fixed: the plan of sorted rows for all numbers of them; None: by their number."""
        self._weights = _Weights(given, fixed)
        self.leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.PARTS, WeightAndReduce.DONE)
        if fixed is not None:
            self.leaves = (WeightAndReduce.DONE,)
        self.dtype, self.quantisation = self._weights.dtype, self._weights.quantisation

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        """The norm behind sums up the parts of few rows."""
        parts = leaves_parts(self._weights.plan(rows, num_topk), rows) and WeightAndReduce.PARTS in allowed
        return WeightAndReduce.PARTS if parts else WeightAndReduce.DONE

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._weights.quantised(x)

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return self._weights.warm_rows(num_topk, most)

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        """The memory between gate and down; and of results before they are summed."""
        rows, weights = x[0], self._weights
        plan = weights.plan(rows, num_topk)
        if isinstance(plan.gate, many.Shape):
            most = most_tiles(rows * num_topk, weights.num_experts, plan.gate.block_m) * plan.gate.block_m
            sorted_inner = WorkspaceShape((most, weights.wide), self.dtype)
            if left is WeightAndReduce.PARTS:
                return (sorted_inner,)
            return sorted_inner, WorkspaceShape((most, weights.hidden), self.dtype)
        inner = WorkspaceShape((rows * num_topk, weights.wide), self.dtype)
        if isinstance(plan.gate, one.Shape) or left is WeightAndReduce.PARTS:
            return (inner,)
        return inner, WorkspaceShape((num_topk, rows, weights.hidden), torch.float32)

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        if not len(given.x):
            return
        _, gate, down = self._weights.plan(*given.routing.experts.shape)
        if isinstance(gate, one.Shape) and isinstance(down, one.Shape):
            experts, scale = given.routing
            one.gate_gemv(given.x, self._weights.gate_up, experts, workspaces[0], gate)
            one.down_gemv(workspaces[0], self._weights.down, experts, scale, out, down)
        elif isinstance(gate, few.Shape) and isinstance(down, few.Shape):
            parts = out if left is WeightAndReduce.PARTS else workspaces[1]
            self._few(given, workspaces[0], parts, gate, down)
            if left is WeightAndReduce.DONE:
                sum_parts(parts, out)
        else:
            assert isinstance(gate, many.Shape) and isinstance(down, many.Shape)  # noqa: PT018
            self._many(given, workspaces, out, gate, down)

    def _few(self, given: Dispatched, inner: Tensor, parts: Tensor, gate: few.Shape, down: few.Shape) -> None:
        weights, (experts, scale) = self._weights, given.routing
        x, first, second = given.x, weights.gate_epilogue, weights.down_epilogue
        few.few(x, weights.gate_up, experts, None, inner, gate, given.scales, weights.gate_up_scale, first)
        codes, scales = weights.quantised_inner(inner)
        few.few(codes, weights.down, experts, scale, parts, down, scales, weights.down_scale, second)

    def _many(
        self, given: Dispatched, workspaces: tuple[Tensor, ...], out: Tensor, gate: many.Shape, down: many.Shape
    ) -> None:
        """Results are parts, or go into the second workspace and are summed up from there."""
        weights, (experts, scale) = self._weights, given.routing
        ids, positions, ends, owners = align(experts, weights.num_experts, gate.block_m)
        entries, num_topk, inner = experts.numel(), experts.shape[1], workspaces[0]
        scales = (given.scales, weights.gate_up_scale)
        many.sorted_gemm(
            given.x, weights.gate_up, inner, gate, ends, ids, num_topk, entries, scales, gate=True, owners=owners,
            epilogue=weights.gate_epilogue,
        )  # fmt: skip
        codes, inner_scales = weights.quantised_inner(inner)
        scales = (inner_scales, weights.down_scale)
        if len(workspaces) == 1:
            to = many.Parts(experts, scale)
            many.sorted_gemm(
                codes, weights.down, out, down, ends, ids, num_topk, entries, scales, parts=to, asks=True,
                epilogue=weights.down_epilogue,
            )  # fmt: skip
            return
        results = workspaces[1]
        many.sorted_gemm(
            codes, weights.down, results, down, ends, entries=entries, scales=scales, asks=True, owners=owners,
            epilogue=weights.down_epilogue,
        )  # fmt: skip
        weighted_sum(results, positions, scale, out)
