"""The reference of ssd/kernel.py and ssd/update.py, in plain torch: the state space of Mamba-2 (Dao and Gu 2024, "SSD").

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T          of each head: h [P, N], x [P], B and C [N], A and dt numbers
    y_t = h_t C_t + D x_t

Heads share B and C within a group. A prompt is computed in chunks: within one as attention, whose weights decay with the distance,
between them by the states.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class TimeSteps(NamedTuple):
    """The time steps of some tokens, before their softplus."""

    dt: Tensor  # [t, heads]; may be strided by token
    bias: Tensor  # float32 [heads]
    low: float = 0.0
    high: float | None = None  # None: no limit

    def values(self) -> Tensor:
        """dt of the formula, float32 [t, heads]."""
        return F.softplus(self.dt.float() + self.bias).clamp(self.low, self.high)


def chunk_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """x [t, heads, P], dt [t, heads] (after softplus), a, d [heads], b, c [t, groups, N], state [heads, P, N] -> y, and the last state.

    All of one sequence, in float32."""
    heads, groups = x.shape[1], b.shape[1]
    if state is None:
        state = x.new_zeros(heads, x.shape[2], b.shape[2])
    y = torch.empty_like(x)
    for begin in range(0, len(x), chunk):
        part = slice(begin, begin + chunk)
        values, steps = x[part] * dt[part, :, None], (dt[part] * a).cumsum(0)  # [q, heads, P], [q, heads]
        # [heads, q, N]
        keys, queries = (each[part].repeat_interleave(heads // groups, 1).transpose(0, 1) for each in (b, c))
        decay = (steps.t()[:, :, None] - steps.t()[:, None, :]).tril()
        weights = (queries @ keys.transpose(1, 2) * decay.exp()).tril()
        found = weights @ values.transpose(0, 1) + steps.t().exp()[:, :, None] * (queries @ state.transpose(1, 2))
        y[part] = found.transpose(0, 1) + d[:, None] * x[part]
        left = (steps[-1] - steps).exp()[..., None] * values  # [q, heads, P]
        state = steps[-1].exp()[:, None, None] * state + left.permute(1, 2, 0) @ keys
    return y, state


def state_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of n sequences: x [n, heads, P], dt [n, heads], b, c [n, groups, N], state [n, heads, P, N] -> y, states."""
    each = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(each, 1), c.repeat_interleave(each, 1)
    state = (dt * a).exp()[..., None, None] * state + (dt[..., None] * x)[..., None] * b[:, :, None]
    return (state @ c[..., None])[..., 0] + d[:, None] * x, state
