"""The reference of norm/kernel.py, in plain torch."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    line = x.float()
    return (line * (line.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, own: tuple[Tensor, float] | None = None
) -> Tensor:
    if own is not None:
        x = rms_norm(x.to(residual.dtype), *own)
    residual.copy_((x.float() + residual.float()).to(residual.dtype))
    return rms_norm(residual, weight, eps)
