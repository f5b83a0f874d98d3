"""The reference of fp8_gemm/kernel.py, in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.float8 import DTYPE

WARM_ROWS = (1, 16, 32, 64, 128, 256)
"""So many rows meet every variant of the kernel."""


class Fp8Weight(NamedTuple):
    """A weight of 8-bit floats, and how its inputs are rounded to them."""

    codes: Tensor  # e4m3 [outputs, inputs]
    scales: Tensor  # float32 [outputs, 1 or groups]
    group: int = 0  # inputs of the weight that share a scale; 0: all
    rounded: int | None = 0  # the same of x, which becomes 8-bit floats; None: it stays as it is
    input_scale: Tensor | None = None  # float32, one number for all of x; None: each row finds its own
    one_row: bool = False  # kernels/gemv computes with it: it was proven to be right (workers/formats/self_test.py)


def fp8_gemm(
    x: Tensor, x_scales: Tensor | None, w: Tensor, w_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of codes times their scales, plus the bias: what kernel.fp8_gemm gives."""

    def values(codes: Tensor, scales: Tensor | None) -> Tensor:
        if scales is None:
            return codes.float()
        size = -(-codes.shape[1] // scales.shape[1])
        size = size if scales.shape[1] == 1 else 1 << (size - 1).bit_length()
        return codes.float() * scales.repeat_interleave(size, dim=1)[:, : codes.shape[1]]

    out = values(x, x_scales) @ values(w, w_scales).t()
    return (out if bias is None else out + bias.float()).to(dtype)


def quantised_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [n, k] -> e4m3 codes, and a float32 scale of each row [n, 1]: max |w| / 448."""
    scales = (weight.abs().amax(dim=1, keepdim=True).float() / 448.0).clamp(min=1e-12)
    return (weight.float() / scales).clamp(-448.0, 448.0).to(DTYPE), scales
