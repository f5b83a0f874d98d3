"""Experts by Triton's kernels, for both formats. One row, few rows and many rows go different ways (kernels/grouped_gemm/plan.py)."""

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm import kernel as many
from meshlm.kernels.grouped_gemm.plan import Layer, plan_for, warm_rows
from meshlm.kernels.moe_align.kernel import align, most_tiles
from meshlm.kernels.moe_few import kernel as few
from meshlm.kernels.moe_gemv import kernel as one
from meshlm.kernels.moe_sum.kernel import sum_parts, weighted_sum
from meshlm.workers.moe.parts import (
    ActivationFormat,
    Dispatched,
    Quantisation,
    WeightAndReduce,
    WorkspaceShape,
)


class TritonExperts:
    """See `meshlm.workers.moe.parts.Experts`. gate_up [local experts, 2 wide, hidden], down [local experts, hidden, wide], 16 bits."""

    name = "triton"
    format = ActivationFormat.CONTIGUOUS
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.PARTS, WeightAndReduce.DONE)
    quantisation = Quantisation.NONE
    chunks = True

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self._gate_up, self._down, self.dtype = gate_up, down, down.dtype
        self._num_experts, self._hidden, self._wide = down.shape

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        """Of few rows the norm behind sums up the parts."""
        parts = plan_for(rows, self._layer(num_topk)).kind == "few" and WeightAndReduce.PARTS in allowed
        return WeightAndReduce.PARTS if parts else WeightAndReduce.DONE

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return warm_rows(self._layer(num_topk), most)

    def _layer(self, num_topk: int) -> Layer:
        return Layer(self._num_experts, num_topk, self._hidden, self._wide)

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        """What stands between gate and down; and results before they are summed."""
        rows, plan = x[0], plan_for(x[0], self._layer(num_topk))
        if isinstance(plan.gate, many.Shape):
            most = most_tiles(rows * num_topk, self._num_experts, plan.gate.block_m) * plan.gate.block_m
            return WorkspaceShape((most, self._wide), self.dtype), WorkspaceShape((most, self._hidden), self.dtype)
        inner = WorkspaceShape((rows * num_topk, self._wide), self.dtype)
        if isinstance(plan.gate, one.Shape) or left is WeightAndReduce.PARTS:
            return (inner,)
        return inner, WorkspaceShape((num_topk, rows, self._hidden), torch.float32)

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        assert given.routing is not None
        x, (experts, weights) = given.x, given.routing
        _, gate, down = plan_for(len(x), self._layer(experts.shape[1]))
        inner = workspaces[0]
        if isinstance(gate, one.Shape) and isinstance(down, one.Shape):
            one.gate_gemv(x, self._gate_up, experts, inner, gate)
            one.down_gemv(inner, self._down, experts, weights, out, down)
        elif isinstance(gate, few.Shape) and isinstance(down, few.Shape):
            parts = out if left is WeightAndReduce.PARTS else workspaces[1]
            few.few(x, self._gate_up, experts, None, inner, gate)
            few.few(inner, self._down, experts, weights, parts, down)
            if left is WeightAndReduce.DONE:
                sum_parts(parts, out)
        else:
            assert isinstance(gate, many.Shape) and isinstance(down, many.Shape)  # noqa: PT018
            assert left is WeightAndReduce.DONE
            ids, positions, ends = align(experts, self._num_experts, gate.block_m)
            entries = experts.numel()
            many.sorted_gemm(x, self._gate_up, inner, gate, ends, ids, experts.shape[1], entries, gate=True)
            many.sorted_gemm(inner, self._down, workspaces[1], down, ends, entries=entries)
            weighted_sum(workspaces[1], positions, weights, out)


class TritonBatchedExperts:
    """The same for batched activations."""

    name = "triton, batched"
    format = ActivationFormat.BATCHED
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.WEIGHTED_SUM,)
    quantisation = Quantisation.NONE
    chunks = False

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self._gate_up, self._down, self.dtype = gate_up, down, down.dtype

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        return WeightAndReduce.WEIGHTED_SUM

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return {rows for rows in (1, 33, 513) if rows <= most}

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        return (WorkspaceShape((*x[:2], self._down.shape[2]), self.dtype),)

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        assert given.num_tokens is not None
        gate, down = batched_shapes(given.x.shape[1])
        many.batched_gemm(given.x, self._gate_up, workspaces[0], gate, given.num_tokens, gate=True)
        many.batched_gemm(workspaces[0], self._down, out, down, given.num_tokens)


def batched_shapes(most: int) -> tuple[many.Shape, many.Shape]:
    """Tiles where an expert has up to so many rows."""
    if most <= 32:
        return many.Shape(16, 64, 128, 4, 3), many.Shape(16, 128, 128, 4, 3)
    if most <= 512:
        return many.Shape(64, 64, 64, 4, 4), many.Shape(64, 128, 64, 4, 4)
    return many.Shape(128, 128, 64, 8, 3), many.Shape(128, 256, 64, 8, 3)
