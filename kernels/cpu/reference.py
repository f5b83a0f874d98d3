"""The reference of rounded.h, in plain torch: rounded activations, to be multiplied with decoded weights."""

import torch
from torch import Tensor

BLOCK = 32  # inputs that share a scale


def round_activations(x: Tensor) -> Tensor:
    """float32 [m, k] -> float64 [m, k]: each 32 inputs become multiples of their largest magnitude / 32512, to the nearest and to even.

    NaN and infinity become NaN, with the whole block."""
    blocks = x.unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    most: Tensor = torch.tensor(32512.0)  # 32512 / largest would be the reciprocal times 32512, rounded twice
    codes = torch.where(largest > 2.0**-100, blocks * (most / largest), 0).round()
    rounded: Tensor = codes.double() * (largest / most).double()
    return rounded.flatten(1)
