"""Experts whose weights stay packed, by kernels/packed_experts: few rows as they are, many by expert."""

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS, Layer
from meshlm.kernels.moe_sum.kernel import sum_parts, weighted_sum
from meshlm.kernels.packed_experts import layer
from meshlm.kernels.packed_experts.kernel import Parts
from meshlm.kernels.packed_experts.layout import ExpertWeight
from meshlm.kernels.packed_experts.plan import Plan, kind_of, plan_for, warm_rows
from meshlm.workers.moe.experts.triton import epilogues
from meshlm.workers.moe.fused_moe import Dispatched, ExpertWeights, Quantisation, WeightAndReduce, WorkspaceShape


class PackedExperts:
    name = "packed"
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.PARTS, WeightAndReduce.DONE)
    quantisation = Quantisation.NONE

    def __init__(self, given: ExpertWeights, *, direct: bool = False) -> None:
        """direct: whether kernels/packed_experts/direct.py may compute with these weights, where it is faster."""
        gate_up, down = given.gate_up.kernel, given.down.kernel
        assert isinstance(gate_up, ExpertWeight) and isinstance(down, ExpertWeight)  # noqa: PT018
        self._gate_up, self._down, self.dtype = gate_up, down, given.down.dtype
        self._above, self._below = epilogues(given.extras, given.act)
        self._kind = kind_of(gate_up, down)
        self._num_experts, self._hidden, self._wide = given.down.shape
        self._direct = direct

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def _layer(self, num_topk: int) -> Layer:
        return Layer(self._num_experts, num_topk, self._hidden, self._wide)

    def plan(self, rows: int, num_topk: int) -> Plan:
        return plan_for(rows, self._layer(num_topk), self._kind, direct=self._direct)

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        """The norm behind sums up the parts of few rows."""
        parts = rows <= PARTS_ROWS and WeightAndReduce.PARTS in allowed
        return WeightAndReduce.PARTS if parts else WeightAndReduce.DONE

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return warm_rows(self._layer(num_topk), most, self._kind, direct=self._direct)

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        """The memory between gate and down; and of results before they are summed."""
        rows = x[0]
        plan = self.plan(rows, num_topk)
        count = layer.num_rows(plan, rows, num_topk, self._num_experts)
        inner = WorkspaceShape((count, self._wide), self.dtype)
        results = WorkspaceShape((count, self._hidden), self.dtype)
        if plan.kind == "few":
            results = WorkspaceShape((num_topk, rows, self._hidden), torch.float32)
        return (inner,) if left is WeightAndReduce.PARTS else (inner, results)

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        (experts, weights), inner = given.routing, workspaces[0]
        if not len(experts):
            return
        plan = self.plan(*experts.shape)
        order, to = layer.order(plan, experts, self._num_experts), Parts(experts, weights)
        layer.gate(plan, given.x, self._gate_up, experts, order, inner, self._above)
        if left is WeightAndReduce.PARTS:
            layer.down(plan, inner, self._down, to, order, out, self._below, parts=True)
        elif order is None:
            sum_parts(layer.down(plan, inner, self._down, to, None, workspaces[1], self._below, parts=True), out)
        else:
            results = layer.down(plan, inner, self._down, to, order, workspaces[1], self._below, parts=False)
            weighted_sum(results, order.positions, weights, out)
