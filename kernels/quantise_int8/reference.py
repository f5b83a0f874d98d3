"""Activations as 8-bit integers, in plain torch; and the weights that they are multiplied with.

    symmetric    s = max |x| / 127                q = round(x / s)
    otherwise    s = (max x - min x) / 255        q = round(x / s) + z,  z = round(-128 - min x / s)        x = (q - z) s

A scale is a row's own, so a text does not depend on the rows beside it; or it is known beforehand, with its zero point.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_SCALE = 1e-12  # of a row of zeros


class Int8Weight(NamedTuple):
    """A weight of 8-bit integers, and how its inputs are rounded to them."""

    codes: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # float32 [outputs, 1]
    sums: Tensor  # float32 [outputs]: of the codes of a row
    symmetric: bool = True
    input_scale: Tensor | None = None  # float32, one number for all of x; None: each row finds its own
    input_zero: Tensor | None = None  # float32, whole; None: 0 where the scale is known


def quantise(
    x: Tensor, symmetric: bool, scale: Tensor | None = None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k] -> int8 [m, k], float32 scales [m, 1] and zero points [m, 1]."""
    values = x.float()
    if scale is not None:
        scales = scale.float().reshape(1, 1).expand(len(x), 1)
        zeros = torch.zeros_like(scales) if zero is None else zero.float().reshape(1, 1).expand(len(x), 1)
    elif symmetric:
        scales = (values.abs().amax(1, keepdim=True) / 127).clamp(min=LEAST_SCALE)
        zeros = torch.zeros_like(scales)
    else:
        least = values.amin(1, keepdim=True)
        scales = ((values.amax(1, keepdim=True) - least) / 255).clamp(min=LEAST_SCALE)
        zeros = (-128 - least / scales).round()
    codes = ((values / scales).round() + zeros).clamp(-128, 127).to(torch.int8)
    return codes, scales.contiguous(), zeros.contiguous()


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [m, inputs] -> [m, outputs], with the values of both in float32."""
    codes, scales, zeros = quantise(x, weight.symmetric, weight.input_scale, weight.input_zero)
    out = ((codes.float() - zeros) * scales) @ (weight.codes.float() * weight.scales).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
