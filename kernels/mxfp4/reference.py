"""MXFP4 weights (OCP Microscaling Formats 1.0):  w = value(code) * 2^(scale - 127)

32 values share a scale, a byte (e8m0). A code has a sign, two bits of exponent and one of mantissa (e2m1); a byte holds two of them,
the first in its low half.
"""

import torch
from torch import Tensor

GROUP = 32  # values that share a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code."""
NAN = 255  # a scale that stands for no number


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., groups, 16] or [..., groups * 16], and uint8 [..., groups] -> the values [..., groups * 32].

    float32 and bfloat16 hold every value exactly. A scale of 255 gives NaN, as the format says."""
    codes = blocks.reshape(*scales.shape, GROUP // 2).to(torch.int32)
    values = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)
    pairs = torch.stack((values[codes & 15], values[codes >> 4]), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 127)
    powers = powers.masked_fill(exponents == NAN, torch.nan)
    return (pairs * powers[..., None]).to(dtype).flatten(-2)
