"""What gemv/kernel.py computes, in plain torch and float32."""

import torch.nn.functional as F
from torch import Tensor


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
) -> tuple[Tensor, Tensor]:
    stream = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    y = stream.float()
    if norm is not None:
        y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.float()
    out = F.linear(y, weight.float())
    if gate:
        first, second = out.chunk(2, dim=-1)
        out = F.silu(first) * second
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype), stream
