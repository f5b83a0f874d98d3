"""What silu_mul/kernel.py computes, in plain torch."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()).to(gate.dtype).float() * up.float()).to(gate.dtype)
