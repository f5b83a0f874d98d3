"""The reference of kernel.py behind gate and up, in plain torch, where that is no silu."""

from torch import Tensor

from meshlm.kernels.silu_mul.reference import sigmoid


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate) of clamped gate and up; of any shape, rounded after each operation."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * sigmoid(gate * alpha)
