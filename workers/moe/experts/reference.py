"""Experts in plain torch, for both formats: what CPUs and GPUs without Triton compute, and what kernels are compared with.

out = (act(x W_gate^T) * (x W_up^T)) W_down^T            one expert after the other, of those that have rows

Experts without a gate: out = act(x W_up^T) W_down^T.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.packed_experts.layout import unpack
from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.workers.formats.fp8 import FP8, ExpertScales, decoded, rounded
from meshlm.workers.moe.parts import (
    ActivationFormat,
    Dispatched,
    ExpertExtras,
    PackedExperts,
    Quantisation,
    WeightAndReduce,
    WorkspaceShape,
)


class ReferenceExperts:
    """See `meshlm.workers.moe.parts.Experts`. gate_up [local experts, 2 wide, hidden], down [local experts, hidden, wide].

    gate_up [local experts, wide, hidden]: there is no gate."""

    name = "reference"
    format = ActivationFormat.CONTIGUOUS
    leaves: tuple[WeightAndReduce, ...] = (WeightAndReduce.DONE, WeightAndReduce.SUM, WeightAndReduce.WEIGHTED_SUM)
    quantisation = Quantisation.NONE
    chunks = True

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        act: str = "silu",
        scales: ExpertScales | None = None,
        extras: ExpertExtras | None = None,
        packed: PackedExperts | None = None,
        gated: bool = True,
    ) -> None:
        """scales: of weights that are 8-bit floats, or were; then activations are rounded too, if the scheme says so. packed: gate_up
        and down are its codes."""
        self._extras, self._packed, self._gated = extras, packed, gated
        self._gate_up, self._down, self._act, self._scales = gate_up, down, ACTIVATIONS[act], scales
        self.dtype = down.dtype if scales is None else scales.dtype
        if packed is not None:
            self.dtype = packed.dtype

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
        extras, scheme = self._extras, None if self._scales is None else self._scales.scheme
        gate_up_bias = None if extras is None or extras.gate_up_bias is None else extras.gate_up_bias[number]
        down_bias = None if extras is None or extras.down_bias is None else extras.down_bias[number]
        given = x if scheme is None else rounded(x, scheme, None)
        inner = self._inner(F.linear(given, self._weight(number, of_gate=True), gate_up_bias))
        inner = inner if scheme is None else rounded(inner, scheme, None)
        return F.linear(inner, self._weight(number, of_gate=False), down_bias)

    def _inner(self, x: Tensor) -> Tensor:
        """What goes down, of gate and up beside one another, or of up alone."""
        if not self._gated:
            return self._act(x)
        gate, up = x.chunk(2, dim=-1)
        if self._extras is not None and self._extras.swiglu is not None:
            return self._extras.gated(gate, up)
        return self._act(gate) * up

    def _weight(self, number: int, *, of_gate: bool) -> Tensor:
        """The numbers of one expert's weight: a CPU has those of 8-bit floats already."""
        if (packed := self._packed) is not None:
            return unpack((packed.gate_up if of_gate else packed.down).of_expert(number), packed.dtype)
        weight, scales = (self._gate_up if of_gate else self._down)[number], self._scales
        if scales is None or weight.dtype != FP8:
            return weight
        return decoded(weight, (scales.gate_up if of_gate else scales.down)[number], scales.scheme, scales.dtype)

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        assert given.routing is not None
        experts, weights = given.routing
        weighted = left is not WeightAndReduce.WEIGHTED_SUM
        sums = torch.zeros(given.x.shape, dtype=torch.float32, device=out.device)
        real = (experts >= 0) & (
            experts < len(self._down)
        )  # while kernels are compiled ahead, nobody has written these
        for number in sorted(set(experts[real].tolist())):
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
