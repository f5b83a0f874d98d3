"""Experts in plain torch, for both formats: what CPUs and GPUs without Triton compute, and what kernels are compared with.

out = (act(x W_gate^T) * (x W_up^T)) W_down^T            one expert after the other, of those that have rows
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.workers.layers.ops import ACTIVATIONS
from meshlm.workers.moe.parts import (
    ActivationFormat,
    Dispatched,
    Quantisation,
    WeightAndReduce,
    WorkspaceShape,
)


class ReferenceExperts:
    """See `meshlm.workers.moe.parts.Experts`. gate_up [local experts, 2 wide, hidden], down [local experts, hidden, wide]."""

    name = "reference"
    format = ActivationFormat.CONTIGUOUS
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.DONE, WeightAndReduce.SUM, WeightAndReduce.WEIGHTED_SUM)
    quantisation = Quantisation.NONE
    chunks = True

    def __init__(self, gate_up: Tensor, down: Tensor, act: str = "silu") -> None:
        self._gate_up, self._down, self._act = gate_up, down, ACTIVATIONS[act]
        self.dtype = down.dtype

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        return allowed[0]

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        return set()

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        return ()

    def expert(self, number: int, x: Tensor) -> Tensor:
        """The output of one expert for x [m, hidden]."""
        gate, up = F.linear(x, self._gate_up[number]).chunk(2, dim=-1)
        return F.linear(self._act(gate) * up, self._down[number])

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        assert given.routing is not None
        experts, weights = given.routing
        weighted = left is not WeightAndReduce.WEIGHTED_SUM
        sums = torch.zeros(given.x.shape, dtype=torch.float32, device=out.device)
        for number in sorted(set(experts[experts >= 0].tolist())):
            rows, places = (experts == number).nonzero(as_tuple=True)
            found = self.expert(number, given.x[rows]).float()
            if weighted:
                found *= weights[rows, places, None]
            if left is WeightAndReduce.DONE:
                sums.index_add_(0, rows, found)
            else:
                out[rows, places] = found.to(out.dtype)
        if left is WeightAndReduce.DONE:
            out.copy_(sums)


class ReferenceBatchedExperts(ReferenceExperts):
    """The same for batched activations."""

    name = "reference, batched"
    format = ActivationFormat.BATCHED
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.WEIGHTED_SUM,)
    chunks = False

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        assert given.num_tokens is not None
        for number, count in enumerate(given.num_tokens.tolist()):
            if count:
                out[number, :count] = self.expert(number, given.x[number, :count])
