"""What stands behind an expert's products, within the kernels that compute them: a bias, and the activation of gate and up.

silu(gate) * up,   or, with alpha and limit (gpt-oss):   (up + 1) gate sigmoid(alpha gate)
                   where gate is at most `limit` and up between -limit and limit
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Epilogue(NamedTuple):
    """bias [experts, outputs] of the weight's dtype. alpha: 0 of silu."""

    bias: Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0


PLAIN = Epilogue()


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """float32 of the same shape, of which gate and up are rounded to dtype first, as products are that are stored."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if ALPHA > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return gate * up
