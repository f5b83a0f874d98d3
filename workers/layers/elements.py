"""What layers are made of: the table of embeddings, norms, linear layers, and the gated MLP of two of these.

How the weight of a linear layer is stored, and which kernel computes with it, is its `WeightFormat`'s affair.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import StepInputs
from meshlm.workers.formats.format import UNQUANTIZED, ProductOps, WeightedLayer
from meshlm.workers.layers.ops import NormWeight, Ops
from meshlm.workers.partial_sum import PartialSum


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Filled when the weights are loaded. dtype: what it keeps, whatever the model's is."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Embedding(nn.Module):
    """Rows begin to end of a table; the other ranks have the rest. `rows` counts padding too. Not nn.Embedding: its initialisation
    imports torch's compiler, two seconds of every start."""

    def __init__(self, rows: int, size: int, begin: int, end: int) -> None:
        super().__init__()
        self.weight = parameter(rows, size)
        self.begin, self.end = begin, end
        self.several = False  # ranks; they have met

    def prepare(self, ops: Ops) -> None:
        """It is the head's weight too: packed once, for both."""
        self.weight = nn.Parameter(ops.pack(self.weight), requires_grad=False)

    def forward(self, ids: Tensor, norm: NormWeight, following: Tensor, ops: Ops) -> tuple[PartialSum, Tensor | None]:
        """The residual, and its norm where that comes for free. norm, following: of the first layer, as `Ops.embed` has them."""
        if self.several:
            return ops.embed_part(ids, self.weight, (self.begin, self.end), norm)
        return ops.embed(ids, self.weight, norm, following)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias (Ba et al. 2016)."""

    weight: nn.Parameter  # None, where there is none: torch takes either

    def __init__(self, size: int, eps: float, *, bias: bool, weight: bool = True) -> None:
        super().__init__()
        self._shape = (size,)
        self.register_parameter("weight", nn.Parameter(torch.ones(size), requires_grad=False) if weight else None)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self.weight, self.bias, self.eps)


class Linear(WeightedLayer):
    """x W^T + b. After `prepare` the weight is in the form that its format computes with."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, UNQUANTIZED, bias=bias)

    @property
    def is_fusible(self) -> bool:
        return self.format.is_fusible

    def weights(self) -> list[nn.Parameter]:
        return [one for name, one in self.named_parameters() if name in ("weight", "weight_values")]

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        out = self.format.apply(self, x, ops)
        return out if ops.adapters is None else ops.adapters.add(self, x, out, ops)

    def row_parallel(self, x: Tensor, residual: Tensor | None, ops: Ops) -> PartialSum:
        if ops.adapters is not None and ops.adapters.changes(self):
            return ops.term(self.forward(x, ops), residual)
        return self.format.row_parallel(self, x, residual, ops)

    def after_norm(self, x: PartialSum, norm: RMSNorm, ops: Ops, *, gate: str = "") -> tuple[Tensor, Tensor]:
        if ops.adapters is not None and ops.adapters.changes(self):
            normed, residual = ops.norm(x, (norm.weight, norm.eps))
            out = self.forward(normed, ops)
            return (ops.act_mul(out, gate) if gate else out), residual
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


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec, size: int | None = None) -> None:
        """size: between gate and down, where it is not the model's."""
        super().__init__()
        size = spec.intermediate_size if size is None else size
        self.gate_up = Linear(spec.hidden_size, 2 * size, bias=spec.mlp_bias)
        self.down = Linear(size, spec.hidden_size, bias=spec.mlp_bias)
        self._act = spec.hidden_act

    def forward(self, x: PartialSum, norm: RMSNorm, batch: StepInputs, ops: Ops) -> PartialSum:
        """Computes what the MLP adds to the residual, which has x in it then."""
        hidden, residual = self.activated(x, norm, ops)
        return self.down.row_parallel(hidden, residual, ops)

    def activated(self, x: PartialSum, norm: RMSNorm, ops: Ops) -> tuple[Tensor, Tensor]:
        """act(gate) * up of the norm, before the down projection; and the residual with x in it."""
        return self.gate_up.after_norm(x, norm, ops, gate=self._act)

    def of_normed(self, x: Tensor, ops: Ops) -> PartialSum:
        """The MLP of what is normed already, without a residual."""
        return self.down.row_parallel(ops.act_mul(self.gate_up(x, ops), self._act), None, ops)
