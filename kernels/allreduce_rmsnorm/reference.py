"""The reference of kernel.py, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def allreduce_rmsnorm(parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and the stream after the addition; `parts` are the ranks' x."""
    total = torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    stream = (total.float() + residual.float()).to(residual.dtype)
    return F.rms_norm(stream.float(), weight.shape, weight.float(), eps).to(residual.dtype), stream
