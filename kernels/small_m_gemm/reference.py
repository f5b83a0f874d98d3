"""The reference of small_m_gemm/kernel.py and the norm behind its parts, in plain torch."""

import torch
from torch import Tensor

from meshlm.kernels.norm.reference import add_rms_norm
from meshlm.kernels.silu_mul.reference import silu_mul


def parts(x: Tensor, w: Tensor, splits: int) -> Tensor:
    shares = zip(x.float().chunk(splits, dim=1), w.float().chunk(splits, dim=1), strict=True)
    return torch.stack([x_part @ w_part.t() for x_part, w_part in shares])


def add_allreduce_rmsnorm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_rms_norm(parts.sum(dim=0).to(residual.dtype), residual, weight, eps)


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() @ w.float().t()).to(x.dtype)


def gate(x: Tensor, w: Tensor) -> Tensor:
    return silu_mul(product(x, w))
