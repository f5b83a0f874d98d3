"""Jamba (AI21 2024), Mamba and Falcon Mamba: a mixer in the place of attention (kernels/selective_scan/reference.py has the formula).

x, z = W_in u;   x = silu(conv(x));   dt, B, C = W_x x, perhaps normed;   y = scan(x, softplus(W_dt dt + bias), B, C) silu(z);   W_out y
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import Linear, RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Attention, LayerClasses
from meshlm.workers.models.hybrid import Convolution, Hybrid, HybridLayer, float_parameter


class MambaMixer(Attention):
    """See the module docstring. `qkv` is the product behind the layer's norm."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        state = layer.state
        assert state is not None
        self._state, inner = state, state.inner
        self._sizes = [state.time_step_rank, state.state_size, state.state_size]
        self.qkv = Linear(spec.hidden_size, 2 * inner, bias=state.proj_bias)
        self.conv = Convolution(inner, state.conv_kernel, bias=state.conv_bias)
        self.x_proj = Linear(inner, sum(self._sizes), bias=False)
        if state.mixer_norm == "weighted":
            self.dt_norm, self.b_norm, self.c_norm = (RMSNorm(size, spec.rms_norm_eps) for size in self._sizes)
        self.dt_proj = Linear(state.time_step_rank, inner, bias=True)
        self.a_log, self.d = float_parameter(inner, state.state_size), float_parameter(inner)
        self.o = Linear(inner, spec.hidden_size, bias=state.proj_bias)
        self._a, self._ones = torch.empty(0), torch.empty(0)

    def prepare(self, ops: Ops) -> None:
        self._a = -self.a_log.exp()
        self._ones = torch.ones(max(self._sizes), dtype=self.conv.weight.dtype, device=self.a_log.device)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        own, ops = cache.state, context.ops
        assert own is not None
        states = context.attention.states(own.group)
        inputs, gate = qkv.chunk(2, dim=1)
        x = states.conv(inputs, self.conv.weight[:, 0], self.conv.bias, own)
        parts = self.x_proj(x.contiguous(), ops).split(self._sizes, dim=1)
        dt, b, c = self._normed(parts, ops)
        return states.selective_scan(x, self.dt_proj(dt.contiguous(), ops), self._a, b, c, self.d, gate, own)

    def _normed(self, parts: Sequence[Tensor], ops: Ops) -> Sequence[Tensor]:
        state = self._state
        match state.mixer_norm:
            case "none":
                return parts
            case "plain":
                return [ops.rms_norm(one, self._ones[: one.shape[1]], state.mixer_norm_eps) for one in parts]
            case "weighted":
                norms = (self.dt_norm, self.b_norm, self.c_norm)
                return [ops.rms_norm(one, norm.weight, norm.eps) for one, norm in zip(parts, norms, strict=True)]


class Jamba(Hybrid):
    classes = LayerClasses(HybridLayer, state=MambaMixer)
