"""The reference of selective_scan/kernel.py, in plain torch: the state space of Mamba (Gu and Dao 2023).

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t          of each channel: h, A, B, C [N], x and dt numbers
    y_t = h_t C_t + D x_t

The kernels multiply by silu(gate) and take dt before its softplus. All channels share B and C.
"""

import torch
from torch import Tensor


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x, dt [t, channels] of one sequence, a [channels, N], b, c [t, N], d [channels], state [channels, N] -> y, and the last state."""
    if state is None:
        state = torch.zeros_like(a)
    decay, added = (dt[..., None] * a).exp(), (dt * x)[..., None] * b[:, None]
    y = torch.empty_like(x)
    for t in range(len(x)):
        state = decay[t] * state + added[t]
        torch.mv(state, c[t], out=y[t])
    return y + d * x, state


def scan_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of n sequences: x, dt [n, channels], b, c [n, N], state [n, channels, N] -> y, states."""
    state = (dt[..., None] * a).exp() * state + (dt * x)[..., None] * b[:, None]
    return (state @ c[..., None])[..., 0] + d * x, state
