"""What norm/kernel.py computes, in plain torch."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    line = x.float()
    return (line * (line.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.copy_((x.float() + residual.float()).to(residual.dtype))
    return rms_norm(residual, weight, eps)
