"""What split_product/kernel.py and the norm behind it compute, in plain torch."""

import torch
from torch import Tensor

from meshlm.kernels.norm.reference import add_rms_norm


def split_product(x: Tensor, w: Tensor, splits: int) -> Tensor:
    shares = zip(x.float().chunk(splits, dim=1), w.float().chunk(splits, dim=1), strict=True)
    return torch.stack([x_part @ w_part.t() for x_part, w_part in shares])


def add_sum_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_rms_norm(parts.sum(dim=0).to(residual.dtype), residual, weight, eps)
