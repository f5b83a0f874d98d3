"""The reference of moe_sum/kernel.py, in plain torch."""

import torch
from torch import Tensor


def weighted_sum(rows: Tensor, positions: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """rows [r, n], positions int32 [m, k] (negative: not there), weights float32 [m, k] -> [m, n]."""
    found = rows[positions.clamp(min=0).long()].float()
    if weights is not None:
        found = found * weights[:, :, None]
    return found.masked_fill((positions < 0)[:, :, None], 0.0).sum(dim=1).to(dtype)
