"""The reference of silu_mul/kernel.py, in plain torch."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of any shape and dtype. On a CPU, as the other activations here, composed in float32 of operations that give
    an element the same bits wherever it stands: torch's own compute those behind the last whole vector of a thread otherwise."""
    if x.device.type != "cpu":
        return x.sigmoid()
    return torch.reciprocal((-x.float()).exp() + 1).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(x) if x.device.type != "cpu" else (x.float() * sigmoid(x.float())).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) (Hendrycks and Gimpel 2016), by the error function."""
    if x.device.type != "cpu":
        return F.gelu(x)
    values = x.float()
    return (((values * math.sqrt(0.5)).erf() + 1) * values * 0.5).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The same by a hyperbolic tangent, which is near it."""
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    values = x.float()
    inner = (values * values * values * 0.044715 + values) * math.sqrt(2 / math.pi)
    return ((inner.tanh() + 1) * values * 0.5).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def silu_mul(gate_up: Tensor) -> Tensor:
    return act_mul(gate_up, "silu")


def act_mul(gate_up: Tensor, act: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (ACTIVATIONS[act](gate.float()).to(gate.dtype).float() * up.float()).to(gate.dtype)
