"""Experts whose weights stay MXFP4, for both formats, by kernels/mxfp4_experts: few rows as they are, many in the order of experts."""

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS
from meshlm.kernels.moe_align.kernel import align, most_tiles
from meshlm.kernels.moe_sum.kernel import sum_parts, weighted_sum
from meshlm.kernels.mxfp4_experts import kernel
from meshlm.kernels.mxfp4_experts.plan import batched_shapes, plan_for, warm_rows
from meshlm.workers.moe.experts.epilogues import epilogues
from meshlm.workers.moe.parts import (
    ActivationFormat,
    Dispatched,
    ExpertExtras,
    PackedExperts,
    Quantisation,
    WeightAndReduce,
    WorkspaceShape,
)


class _MXFP4:
    """What both have in common."""

    quantisation = Quantisation.NONE

    def __init__(self, packed: PackedExperts, extras: ExpertExtras | None = None, act: str = "silu") -> None:
        self._gate_up, self._down, self.dtype = packed
        self._above, self._below = epilogues(extras, act)
        self._num_experts, self._hidden, self._wide = len(self._down.codes), self._gate_up.inputs, self._down.inputs

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None


class MXFP4Experts(_MXFP4):
    """See `meshlm.workers.moe.parts.Experts`."""

    name = "mxfp4"
    format = ActivationFormat.CONTIGUOUS
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.PARTS, WeightAndReduce.DONE)
    chunks = True

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        """The norm behind sums up the parts of few rows."""
        parts = rows <= PARTS_ROWS and WeightAndReduce.PARTS in allowed
        return WeightAndReduce.PARTS if parts else WeightAndReduce.DONE

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return warm_rows(num_topk, self._num_experts, most)

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        """What stands between gate and down; and results before they are summed."""
        rows = x[0]
        plan = plan_for(rows, num_topk, self._num_experts)
        if plan.kind == "few":
            inner = WorkspaceShape((rows * num_topk, self._wide), self.dtype)
            results = WorkspaceShape((num_topk, rows, self._hidden), torch.float32)
        else:
            most = most_tiles(rows * num_topk, self._num_experts, plan.gate.block_m) * plan.gate.block_m
            inner = WorkspaceShape((most, self._wide), self.dtype)
            results = WorkspaceShape((most, self._hidden), self.dtype)
        return (inner,) if left is WeightAndReduce.PARTS else (inner, results)

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        assert given.routing is not None
        (experts, weights), inner = given.routing, workspaces[0]
        if not len(experts):
            return
        kind, gate, down = plan_for(len(experts), experts.shape[1], self._num_experts)
        if kind == "few":
            parts = out if left is WeightAndReduce.PARTS else workspaces[1]
            kernel.few(given.x, self._gate_up, experts, None, inner, gate, self._above)
            kernel.few(inner, self._down, experts, weights, parts, down, self._below)
            if left is WeightAndReduce.DONE:
                sum_parts(parts, out)
            return
        ids, positions, ends, owners = align(experts, self._num_experts, gate.block_m)
        rows = kernel.Rows(ids, ends, owners, experts.shape[1], experts.numel())
        kernel.sorted_rows(given.x, self._gate_up, inner, gate, rows, gate=True, epilogue=self._above)
        if left is WeightAndReduce.PARTS:
            to = kernel.Parts(experts, weights)
            kernel.sorted_rows(inner, self._down, out, down, rows, parts=to, epilogue=self._below)
        else:
            kernel.sorted_rows(inner, self._down, workspaces[1], down, rows, epilogue=self._below)
            weighted_sum(workspaces[1], positions, weights, out)


class MXFP4BatchedExperts(_MXFP4):
    """The same for batched activations."""

    name = "mxfp4, batched"
    format = ActivationFormat.BATCHED
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.WEIGHTED_SUM,)
    chunks = False

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        return WeightAndReduce.WEIGHTED_SUM

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return {rows for rows in (1, 17, 65, 513) if rows <= most}

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        return (WorkspaceShape((*x[:2], self._wide), self.dtype),)

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        assert given.num_tokens is not None
        if not out.numel():
            return
        (inner,), counts = workspaces, given.num_tokens
        gate, down = batched_shapes(given.x.shape[1])
        kernel.batched_rows(given.x, self._gate_up, inner, gate, counts, gate=True, epilogue=self._above)
        kernel.batched_rows(inner, self._down, out, down, counts, epilogue=self._below)
