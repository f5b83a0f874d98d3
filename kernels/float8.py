"""Numbers as 8-bit floats in plain torch: e4m3 (4 bits of exponent, 3 of mantissa; no infinity, 448 at most) or e5m2 (57344 at most).

    stored = round(clamp(x / scale, -largest, largest))         x = stored * scale

It is what weights, activations and KV caches of these types hold; kernels/fp8.py is the same for kernels. It imports no Triton: a CPU
may have none.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def largest(dtype: torch.dtype) -> float:
    """The largest number of such a type; 0 of another, whose numbers are stored as they are."""
    return LARGEST.get(dtype, 0.0)


def stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The numbers that a cache of this dtype holds of x."""
    most = largest(dtype)
    return (x.float() / scale).clamp(-most, most).to(dtype) if most else x.to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory, where torch cannot index the dtype everywhere."""
    return x.view(torch.uint8) if largest(x.dtype) else x
