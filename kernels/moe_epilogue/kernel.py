"""What stands behind an expert's products, within the kernels that compute them: a bias, and the activation of gate and up.

silu(gate) * up
(up + 1) gate sigmoid(alpha gate)     with alpha and limit (gpt-oss): gate is at most `limit`, up between -limit and limit
gelu(gate) * up                       with alpha alone: gelu(x) = x sigmoid(alpha (x + 0.044715 x^3)), where alpha is sqrt(8 / pi)
                                      (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2: the form with tanh)
relu(up)^2                            of experts without a gate (So et al. 2021, "Primer", section 4)
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Epilogue(NamedTuple):
    """bias [experts, outputs] of the weight's dtype. alpha: 0 of silu. limit: 0 where nothing is clamped. gated: whether the first
    product's weight has a gate's lines before those of up."""

    bias: Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0
    gated: bool = True


PLAIN = Epilogue()
GELU_ALPHA = (8.0 / math.pi) ** 0.5


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """float32 of the same shape, of which gate and up are rounded to dtype first, as products are that are stored."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if ALPHA > 0 and LIMIT == 0:
        gate = (gate / (1.0 + tl.exp(-ALPHA * (gate + 0.044715 * gate * gate * gate)))).to(dtype).to(tl.float32)
    elif ALPHA > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return gate * up


@triton.jit
def squared_relu(up, dtype: tl.constexpr):
    """float32 of the same shape, of which up is rounded as in `activated`."""
    up = up.to(dtype).to(tl.float32)
    up = tl.where(up < 0, 0.0, up)
    return up * up
