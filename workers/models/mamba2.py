"""Mamba-2's mixer in the place of attention (kernels/ssd/reference.py has the formula).

    z, x, B, C, dt = W_in u;   x, B, C = silu(conv(x, B, C));   y = norm(SSD(x, softplus(dt + bias), B, C) * silu(z));   W_out y

The norm is over the heads of one group of B and C at a time.
"""

import torch
from torch import Tensor, nn

from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Attention


class Convolution(nn.Module):
    """A causal convolution of each channel."""

    def __init__(self, channels: int, kernel: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None


def float_parameter(*shape: int) -> nn.Parameter:
    """What is kept in float32, whatever the model's dtype is."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)


class Mamba2Mixer(Attention):
    """See the module docstring. `qkv` is the product behind the layer's norm."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        state = layer.state
        assert state is not None
        self._state, self._eps = state, spec.rms_norm_eps
        self._numbers = state.n_groups * state.state_size
        sizes = (state.inner, state.conv_dim, state.num_heads)
        self.qkv = Linear(spec.hidden_size, sum(sizes), bias=state.proj_bias)
        self._sizes = list(sizes)
        self.conv = Convolution(state.conv_dim, state.conv_kernel, bias=state.conv_bias)
        self.dt_bias, self.a_log, self.d = (float_parameter(state.num_heads) for _ in range(3))
        self.gated_norm = RMSNorm(state.inner, spec.rms_norm_eps) if state.gated_norm else None
        self.o = Linear(state.inner, spec.hidden_size, bias=state.proj_bias)
        self._a = torch.empty(0)

    def prepare(self, ops: Ops) -> None:
        self._a = -self.a_log.exp()

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        state, own = self._state, cache.state
        assert own is not None
        gate, inputs, dt = qkv.split(self._sizes, dim=1)
        states = context.attention.states(own.group)
        mixed = states.conv(inputs, self.conv.weight[:, 0], self.conv.bias, own)
        x, b, c = mixed.split([state.inner, self._numbers, self._numbers], dim=1)
        groups = (len(x), state.n_groups, state.state_size)
        heads = x.reshape(len(x), state.num_heads, state.head_dim)
        steps = TimeSteps(dt, self.dt_bias, *state.time_step_limit)
        found = states.ssd(heads, steps, self._a, b.reshape(groups), c.reshape(groups), self.d, own)
        weight = None if self.gated_norm is None else self.gated_norm.weight
        group, before = state.inner // state.n_groups, state.norm_before_gate
        return context.ops.gated_norm(found.flatten(1), gate, weight, self._eps, group, before=before)
