"""A linear layer of a model. How its weight is stored, and which kernel computes with it, is its `WeightFormat`'s affair."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.workers.formats.format import Fused, WeightFormat
from meshlm.workers.formats.unquantized import UNQUANTIZED
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.partial_sum import PartialSum


class Linear(nn.Module):
    """x W^T + b. After `prepare` the weight is in the form that its method computes with."""

    weight: nn.Parameter
    eight_bits: Fp8Weight | None = None
    """The whole weight as `Ops.norm_fp8_linear` takes it, if its method says so."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.use(UNQUANTIZED)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None

    def use(self, format: WeightFormat) -> None:
        """Sets another method than the unquantised one; called before loading."""
        self.format = format
        format.add_parameters(self)
        self.fuses_norm = self.fuses_sum = False

    def prepare(self, ops: Ops) -> None:
        self.format.finish(self, ops)
        self.fuses_norm, self.fuses_sum = self.format.fused(Fused.NORM), self.format.fused(Fused.ROW_PARALLEL)

    def weights(self) -> list[nn.Parameter]:
        """All forms of the weight that the layer has."""
        return [one for name, one in self.named_parameters() if name in ("weight", "weight_values")]

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return self.format.apply(self, x, ops)

    def row_parallel(self, x: Tensor, residual: Tensor | None, ops: Ops) -> PartialSum:
        """See `Ops.row_parallel_linear`."""
        if self.fuses_sum:
            return ops.row_parallel_linear(x, self.weight, self.bias, self.outputs, residual)
        return ops.term(self.format.apply(self, x, ops), residual)

    def after_norm(self, x: PartialSum, norm: RMSNorm, ops: Ops, *, gate: str = "") -> tuple[Tensor, Tensor]:
        """See `Ops.norm_linear`."""
        if self.fuses_norm:
            return ops.norm_linear(x, (norm.weight, norm.eps), self.weight, self.bias, self.outputs, gate=gate)
        if self.eight_bits is not None:
            return ops.norm_fp8_linear(x, (norm.weight, norm.eps), self.eight_bits, self.bias, gate=gate)
        normed, residual = ops.norm(x, (norm.weight, norm.eps))
        out = self.format.apply(self, normed, ops)
        return (ops.act_mul(out, gate) if gate else out), residual


class Matrix(Linear):
    """A linear layer whose weight the model multiplies with in ways of its own: a plain matrix, however the files store it."""

    def prepare(self, ops: Ops) -> None:
        """The weight becomes its values, and nothing else is left."""
        values = self.format.values(self)
        self.use(UNQUANTIZED)
        self.weight = nn.Parameter(values, requires_grad=False)
        for name in self._parameters.keys() - {"weight", "bias"}:
            self._parameters.pop(name)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return F.linear(x, self.weight)
