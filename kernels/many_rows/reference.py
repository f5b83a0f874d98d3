"""What many_rows/kernel.py computes, in plain torch: the unfused operations, one after the other."""

from torch import Tensor

from meshlm.kernels.silu_mul.reference import silu_mul


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.float() @ w.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def gated(x: Tensor, w: Tensor) -> Tensor:
    return silu_mul(product(x, w))
