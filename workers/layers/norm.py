"""The weight of a norm."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """The weight of a norm; ops compute it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps
