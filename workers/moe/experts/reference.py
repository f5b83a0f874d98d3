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
    ExpertExtras,
    Quantisation,
    WeightAndReduce,
    WorkspaceShape,
)
from meshlm.workers.quantization.fp8 import FP8, ExpertScales, decoded, rounded


class ReferenceExperts:
    """See `meshlm.workers.moe.parts.Experts`. gate_up [local experts, 2 wide, hidden], down [local experts, hidden, wide]."""

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
    ) -> None:
        """scales: of weights that are 8-bit floats, or were; then activations are rounded too, if the scheme says so."""
        self._extras = extras
        self._gate_up, self._down, self._act, self._scales = gate_up, down, ACTIVATIONS[act], scales
        self.dtype = down.dtype if scales is None else scales.dtype

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
        scales = self._scales
        if self._extras is not None:
            return self._with_extras(number, x, self._extras)
        if scales is None:
            gate, up = F.linear(x, self._gate_up[number]).chunk(2, dim=-1)
            return F.linear(self._act(gate) * up, self._down[number])
        gate_up = _values(self._gate_up[number], scales.gate_up[number], scales)
        gate, up = F.linear(rounded(x, scales.scheme, None), gate_up).chunk(2, dim=-1)
        inner = rounded(self._act(gate) * up, scales.scheme, None)
        return F.linear(inner, _values(self._down[number], scales.down[number], scales))

    def _with_extras(self, number: int, x: Tensor, extras: ExpertExtras) -> Tensor:
        biases = (None if bias is None else bias[number] for bias in (extras.gate_up_bias, extras.down_bias))
        gate_up_bias, down_bias = biases
        gate, up = F.linear(x, self._gate_up[number], gate_up_bias).chunk(2, dim=-1)
        inner = self._act(gate) * up if extras.swiglu is None else extras.gated(gate, up)
        return F.linear(inner, self._down[number], down_bias)

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


def _values(weight: Tensor, scale: Tensor, scales: ExpertScales) -> Tensor:
    """The numbers of one expert's weight: a CPU has them already."""
    return decoded(weight, scale, scales.scheme, scales.dtype) if weight.dtype == FP8 else weight


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
