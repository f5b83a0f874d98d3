"""The reference of causal_conv/kernel.py, in plain torch.

    y_t = silu(bias + sum over k of weight_k x_(t - K + 1 + k))         each channel for itself; or without silu

The inputs before the first token are the state: the last K - 1 of the tokens before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """x [t, channels] of one sequence, weight [channels, K], state [channels, K - 1] (None: zeros) -> y, and the state behind x."""
    kernel = weight.shape[1]
    if state is None:
        state = x.new_zeros(x.shape[1], kernel - 1)
    inputs = torch.cat((state.to(x.dtype), x.t()), dim=1)
    found = F.conv1d(inputs[None], weight[:, None], bias, groups=weight.shape[0])[0]
    return (F.silu(found) if silu else found).t(), inputs[:, inputs.shape[1] - kernel + 1 :]


def conv_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """One token of each of n sequences: x [n, channels], state [n, channels, K - 1] -> y, and the states behind them."""
    inputs = torch.cat((state.to(x.dtype), x[..., None]), dim=2)
    found = (inputs * weight).sum(-1)
    found = found if bias is None else found + bias
    return (F.silu(found) if silu else found), inputs[..., 1:]
