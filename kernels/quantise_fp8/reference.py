"""The reference of quantise_fp8/kernel.py, in plain torch."""

import torch
from torch import Tensor

from meshlm.kernels.float8 import DTYPE, largest, stored

LEAST_SCALE = 1e-12  # of zeros


def quantise(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [m, k] -> e4m3 [m, k] and float32 [m, groups]; group: columns that have a scale together, 0: all of a row.

    scale: one number that is everybody's."""
    rows, columns = x.shape
    size = group or columns
    padded = torch.nn.functional.pad(x.float(), (0, -columns % size)).view(rows, -1, size)
    scales = (padded.abs().amax(dim=-1) / largest(DTYPE)).clamp(min=LEAST_SCALE)
    if scale is not None:
        scales = scale.expand_as(scales)
    codes = stored(padded / scales[:, :, None], 1.0, DTYPE)
    return codes.flatten(1)[:, :columns].contiguous(), scales
