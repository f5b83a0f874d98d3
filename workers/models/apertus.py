"""Apertus: an MLP without a gate, down(xielu(up(x))).

    xielu(x) = p x^2 + b x                         where x > 0
               n (exp(min(x, e)) - 1 - x) + b x    elsewhere           (Huang and Schlag 2024)

p = softplus(alpha_p), n = b + softplus(alpha_n); alpha_p, alpha_n, b and e are a layer's own, and stay in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Decoder, DecoderLayer, LayerClasses
from meshlm.workers.models.layer_norm import UngatedMLP
from meshlm.workers.partial_sum import PartialSum


def _number() -> nn.Parameter:
    return nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)


def _softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


class XieluMLP(UngatedMLP):
    def __init__(self, spec: ModelSpec, size: int | None = None) -> None:
        super().__init__(spec, size)
        self._given: tuple[float, ...] = ()

    def use(self, numbers: tuple[float, ...]) -> None:
        """alpha_p, alpha_n, b and e; empty: they are tensors of the checkpoint."""
        if not numbers:
            self.alpha_p, self.alpha_n, self.beta, self.eps = _number(), _number(), _number(), _number()
            return
        alpha_p, alpha_n, beta, eps = numbers
        self._given = (_softplus(alpha_p), beta + _softplus(alpha_n), beta, eps)

    def activated(self, x: PartialSum, norm: RMSNorm, ops: Ops) -> tuple[Tensor, Tensor]:
        hidden, residual = self.up.after_norm(x, norm, ops)
        return self._xielu(hidden), residual

    def of_normed(self, x: Tensor, ops: Ops) -> PartialSum:
        return self.down.row_parallel(self._xielu(self.up(x, ops)), None, ops)

    def _loaded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n), self.beta, self.eps

    def _xielu(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        p, n, beta, eps = self._given or self._loaded()
        below = (torch.expm1(x.clamp(max=eps)) - x) * n
        found = torch.where(x > 0, x * x * p, below) + x * beta
        return found.to(hidden.dtype)


class ApertusLayer(DecoderLayer):
    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        super().__init__(spec, layer, classes)
        record = spec.layers[layer].mlp
        assert isinstance(self.mlp, XieluMLP)
        assert record is not None
        self.mlp.use(record.xielu)


class Apertus(Decoder):
    classes = LayerClasses(ApertusLayer, mlp=XieluMLP)
