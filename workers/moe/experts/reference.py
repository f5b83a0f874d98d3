"""Experts in plain torch: what CPUs and GPUs without Triton compute, and what kernels are compared with.

out = (act(x W_gate^T) * (x W_up^T)) W_down^T            one expert after the other, of those that have rows

Experts without a gate: out = act(x W_up^T) W_down^T.
"""

from typing import Protocol, Self

import torch
from torch import Tensor

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.workers.moe.fused_moe import Dispatched, ExpertWeights, Quantisation, WeightAndReduce, WorkspaceShape


class ExpertChanges(Protocol):
    """What is added to products of experts for some tokens of a step."""

    def add(self, product: str, number: int, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        """product: gate_up or down, of the expert with this number. x [m, inputs], of these of the step's tokens, int64 [m]. out
        [m, outputs]: the product with its bias, in place."""


class ReferenceExperts:
    name = "reference"
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.DONE, WeightAndReduce.SUM, WeightAndReduce.WEIGHTED_SUM)
    quantisation = Quantisation.NONE

    def __init__(self, given: ExpertWeights, changes: ExpertChanges | None = None) -> None:
        self._given, self._changes = given, changes
        self._gate_up, self._down, act, self._extras, self._gated = given
        self._act, self.dtype = ACTIVATIONS[act], given.down.dtype

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        return allowed[0]

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return set()

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        return ()

    def changed(self, changes: ExpertChanges) -> Self:
        """The experts of one step. Its tokens are the rows that are dispatched to them, in their order."""
        return type(self)(self._given, changes)

    def expert(self, number: int, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """tokens: which of the step's x is of; needed where something changes them."""
        extras = self._extras
        gate_up_bias = None if extras is None or extras.gate_up_bias is None else extras.gate_up_bias[number]
        down_bias = None if extras is None or extras.down_bias is None else extras.down_bias[number]
        product = self._gate_up.linear(number, x, gate_up_bias)
        if self._changes is not None and tokens is not None:
            self._changes.add("gate_up", number, x, tokens, product)
        inner = self._inner(product)
        found = self._down.linear(number, inner, down_bias)
        if self._changes is not None and tokens is not None:
            self._changes.add("down", number, inner, tokens, found)
        return found

    def _inner(self, x: Tensor) -> Tensor:
        """The input of the down product, of gate and up beside one another, or of up alone."""
        if not self._gated:
            return self._act(x)
        gate, up = x.chunk(2, dim=-1)
        if self._extras is not None and self._extras.swiglu is not None:
            return self._extras.gated(gate, up)
        return self._act(gate) * up

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        experts, weights = given.routing
        weighted = left is not WeightAndReduce.WEIGHTED_SUM
        sums = torch.zeros(given.x.shape, dtype=torch.float32, device=out.device)
        num_experts, _, _ = self._down.shape
        real = (experts >= 0) & (experts < num_experts)  # while kernels are compiled ahead, nobody has written these
        for number in sorted(set(experts[real].tolist())):
            rows, places = (experts == number).nonzero(as_tuple=True)
            found = self.expert(number, given.x[rows], rows + given.first).float()
            if weighted:
                found *= weights[rows, places, None]
            if left is WeightAndReduce.DONE:
                sums.index_add_(0, rows, found)
            else:
                out[rows, places] = found.to(out.dtype)
        if left is WeightAndReduce.DONE:
            out.copy_(sums)
