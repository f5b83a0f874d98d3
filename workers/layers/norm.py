"""The weights of norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """The weight of a norm; ops compute it."""

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
