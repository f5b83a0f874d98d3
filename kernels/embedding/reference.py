"""The reference of embedding/kernel.py, in plain torch."""

import torch
from torch import Tensor

from meshlm.kernels.norm.reference import rms_norm


def embed(
    ids: Tensor, table: Tensor, norm: tuple[Tensor, float] | None = None, first: int = 0
) -> tuple[Tensor, Tensor | None]:
    row = ids.long() - first
    here = (row >= 0) & (row < table.shape[0])
    out = torch.where(here[:, None], table[row.clamp(0, table.shape[0] - 1)], 0.0).to(table.dtype)
    return out, None if norm is None else rms_norm(out, *norm)
