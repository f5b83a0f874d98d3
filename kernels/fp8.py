"""Keys and values as 8-bit floats (e4m3: sign, 4 bits of exponent, 3 of mantissa; no infinity, 448 at most).

    stored = round(clamp(x / scale, -448, 448))         x = stored * scale

Used by the kernels that write a cache of torch.float8_e4m3fn; those that read it multiply scores and results by the scales.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0


@triton.jit
def within(x, scale):
    """x / scale in the range of e4m3, float32: conversion alone may not saturate."""
    return tl.minimum(tl.maximum(x / scale, -448.0), 448.0)


def stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The reference of what a cache of this dtype holds of x."""
    if dtype != DTYPE:
        return x.to(dtype)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(dtype)
