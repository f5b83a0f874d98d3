"""The reference of gemv/kernel.py, in plain torch and float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.fp8_gemm.reference import Fp8Weight, fp8_gemm
from meshlm.kernels.quantise_fp8.reference import quantise
from meshlm.kernels.silu_mul.reference import ACTIVATIONS


def of_8_bits(y: Tensor, weight: Fp8Weight) -> Tensor:
    """y [1, k] -> float32 [1, n]."""
    codes, y_scales = (y, None) if weight.rounded is None else quantise(y, weight.rounded, weight.input_scale)
    return fp8_gemm(codes, y_scales, weight.codes, weight.scales, None, torch.float32)


def _normed(y: Tensor, weight: Tensor, eps: float) -> Tensor:
    return y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def gemv(
    x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None = None, *, norm: Tensor | None = None,
    residual: Tensor | None = None, eps: float = 0.0, own: tuple[Tensor, float] | None = None, gate: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if own is not None:
        x = _normed(x.float(), *own).to(x.dtype)
    stream = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    y = stream.float()
    if norm is not None:
        y = _normed(y, norm, eps)
    if isinstance(weight, Tensor):
        out = F.linear(y, weight.float())
    else:
        out = of_8_bits(y.to(x.dtype), weight)
    if gate:
        first, second = out.chunk(2, dim=-1)
        out = ACTIVATIONS[gate](first) * second
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype), stream
