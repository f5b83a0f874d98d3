"""A linear layer of a model. How its weight is stored, and which kernel computes with it, is its `WeightFormat`'s affair."""

import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.workers.formats.format import UNQUANTIZED, ProductOps, WeightedLayer
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.partial_sum import PartialSum


class Linear(WeightedLayer):
    """x W^T + b. After `prepare` the weight is in the form that its format computes with."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, UNQUANTIZED, bias=bias)

    @property
    def is_fusible(self) -> bool:
        return self.format.is_fusible

    def weights(self) -> list[nn.Parameter]:
        """All forms of the weight that the layer has."""
        return [one for name, one in self.named_parameters() if name in ("weight", "weight_values")]

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return self.format.apply(self, x, ops)

    def row_parallel(self, x: Tensor, residual: Tensor | None, ops: Ops) -> PartialSum:
        return self.format.row_parallel(self, x, residual, ops)

    def after_norm(self, x: PartialSum, norm: RMSNorm, ops: Ops, *, gate: str = "") -> tuple[Tensor, Tensor]:
        return self.format.after_norm(self, x, (norm.weight, norm.eps), ops, gate)


class Matrix(Linear):
    """A linear layer whose weight the model multiplies with in ways of its own: a plain matrix, however the files store it."""

    def prepare(self, ops: ProductOps) -> None:
        """The weight becomes its values, and nothing else is left."""
        values = self.format.values(self)
        self.use(UNQUANTIZED)
        self.keep("weight", values)
        self.drop_others()

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return F.linear(x, self.weight)
