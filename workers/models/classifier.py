"""A classifier of pooled states: products with functions between them (HeadSpec). It is small, and computes in float32."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.model import HeadSpec, ModelSpec
from meshlm.workers.layers.elements import LayerNorm

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "tanh": torch.tanh,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


class _Product(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


class Classifier(nn.Module):
    def __init__(self, spec: ModelSpec, head: HeadSpec) -> None:
        super().__init__()
        hidden, self.spec = spec.hidden_size, head
        sizes = [hidden] * (head.layers - 1) + [head.num_labels]
        self.products = nn.ModuleList()
        if not head.token_ids:  # else `take` makes it, of what the model has
            self.products.extend(_Product(hidden, size, bias=bias) for size, bias in zip(sizes, head.bias, strict=True))
        self.norm = LayerNorm(hidden, spec.rms_norm_eps, bias=spec.norm_bias) if head.norm else None

    def take(self, projection: Tensor) -> None:
        """The rows [vocab, hidden] of the output projection that HeadSpec.token_ids names become the product."""
        rows = projection[list(self.spec.token_ids)].float()
        if self.spec.num_labels < len(rows):
            rows = rows[1:] - rows[:1]
        product = _Product(rows.shape[1], rows.shape[0], bias=False)
        product.weight = nn.Parameter(rows, requires_grad=False)
        self.products.append(product)

    def forward(self, x: Tensor, *, activation: bool, calibration: tuple[float, float] = (0.0, 1.0)) -> Tensor:
        """Pooled states float32 [n, hidden] -> logits [n, labels], or scores. calibration: the logits' mean and sigma (Platt 1999)."""
        for place, product in enumerate(self.products):
            x = product(x)
            if place < len(self.products) - 1:
                x = FUNCTIONS[self.spec.act](x)
                if place == 0 and self.norm is not None:
                    bias = None if self.norm.bias is None else self.norm.bias.float()
                    x = F.layer_norm(x, x.shape[-1:], self.norm.weight.float(), bias, self.norm.eps)
        mean, sigma = calibration
        if calibration != (0.0, 1.0):
            x = (x - mean) / sigma
        if not activation or self.spec.activation == "none":
            return x
        return x.sigmoid() if self.spec.activation == "sigmoid" else x.softmax(-1)
