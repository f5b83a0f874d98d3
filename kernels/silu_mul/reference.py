"""The reference of silu_mul/kernel.py, in plain torch."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def silu_mul(gate_up: Tensor) -> Tensor:
    return act_mul(gate_up, "silu")


def act_mul(gate_up: Tensor, act: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (ACTIVATIONS[act](gate.float()).to(gate.dtype).float() * up.float()).to(gate.dtype)
