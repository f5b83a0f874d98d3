"""Mamba-2's mixer in the place of attention (kernels/ssd/reference.py has the formula).

    z, x, B, C, dt = W_in u;   x, B, C = silu(conv(x, B, C));   y = norm(SSD(x, softplus(dt + bias), B, C) * silu(z));   W_out y

The norm is over the heads of one group of B and C at a time.

Decoders of which layers attend, keep a recurrent state, or do neither, and have an MLP, experts, or none of them.

A mixer with a state stands in the place of attention (`Mamba2Mixer`), so a layer, its norms and its sums are `decoder.py`'s.

Falcon-H1: attention and a Mamba-2 mixer read the same norm. One product makes the inputs of both, one takes the outputs of both.

LFM2's short convolution in the place of attention: B, C, x = W_in u;   W_out (C * conv(B * x)), without an activation.

Jamba (AI21 2024), Mamba and Falcon Mamba: a mixer in the place of attention (kernels/selective_scan/reference.py has the formula).

x, z = W_in u;   x = silu(conv(x));   dt, B, C = W_x x, perhaps normed;   y = scan(x, softplus(W_dt dt + bias), B, C) silu(z);   W_out y
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, Linear, RMSNorm, parameter
from meshlm.workers.layers.moe import MoE
from meshlm.workers.layers.ops import Ops
from meshlm.workers.lora.step_adapters import StepAdapters
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses
from meshlm.workers.models.layer_norm import UngatedMLP
from meshlm.workers.partial_sum import PartialSum


class Convolution(nn.Module):
    def __init__(self, channels: int, kernel: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, kernel)
        self.bias = parameter(channels) if bias else None


float_parameter = partial(parameter, dtype=torch.float32)
"""What is kept in float32, whatever the model's dtype is."""


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


class NoMixer(Attention):
    """A layer that is an MLP alone."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        """See `Attention.make`: there is nothing."""

    def prepare(self, ops: Ops) -> None:
        """See `Attention.prepare`: there is nothing."""


class NoMLP(MLP):
    """A layer that is a mixer alone."""

    def __init__(self, spec: ModelSpec) -> None:
        nn.Module.__init__(self)


class HybridLayer(DecoderLayer):
    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        nn.Module.__init__(self)
        record = spec.layers[layer]
        kind = classes.state if record.state else classes.attention if record.attention else NoMixer
        self.attention = kind(spec, layer)
        if kind is not NoMixer:
            self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp: MLP | MoE
        if record.mlp is not None:
            self.mlp = classes.mlp(spec, record.mlp.intermediate_size)
        else:
            self.mlp = classes.experts(spec) if record.experts is not None else NoMLP(spec)
        if not isinstance(self.mlp, NoMLP):
            self.post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        if not isinstance(self.attention, NoMixer):
            x = self.attention(x, self.input_norm, cache, context, normed)
        if isinstance(self.mlp, NoMLP):
            return x
        found: PartialSum = self.mlp(x, self.post_norm, context.batch, context.ops)
        return found


class Hybrid(Decoder):
    classes = LayerClasses(HybridLayer, state=Mamba2Mixer)

    def embedded(self, ids: Tensor, adapters: StepAdapters | None = None) -> tuple[PartialSum, Tensor | None]:
        """See `Decoder.embedded`; a first layer without a mixer has no norm before one."""
        first = self.layers[0]
        if isinstance(first, DecoderLayer) and isinstance(first.attention, NoMixer):
            return PartialSum(self.embedding(ids, adapters)), None
        return super().embedded(ids, adapters)


class UngatedExperts(MoE):
    shared_kind = UngatedMLP


class NemotronH(Hybrid):
    classes = LayerClasses(HybridLayer, state=Mamba2Mixer, mlp=UngatedMLP, experts=UngatedExperts)


class ParallelMixer(Mamba2Mixer):
    """Rows of `qkv`: queries, keys, values, and what the mixer takes. Columns of `o`: heads of attention, and those of the mixer."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        Attention.make(self, spec, layer)
        super().make(spec, layer)
        heads = spec.num_attention_heads * self.head_dim
        self._attends = heads + 2 * self.kv_heads * self.head_dim
        self.qkv = Linear(spec.hidden_size, self._attends + sum(self._sizes), bias=False)
        self.o = Linear(heads + self._state.inner, spec.hidden_size, bias=False)

    def prepare(self, ops: Ops) -> None:
        Attention.prepare(self, ops)
        super().prepare(ops)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        heads = qkv[:, : self._attends].contiguous()
        found = Attention.attend(self, heads, cache, context)
        return torch.cat((found, super().attend(qkv[:, self._attends :], cache, context)), dim=1)


class FalconH1(Hybrid):
    classes = LayerClasses(HybridLayer, state=ParallelMixer)


class ShortConvolution(Attention):
    """See the module docstring. `qkv` is the product behind the layer's norm."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        state = layer.state
        assert state is not None
        self.qkv = Linear(spec.hidden_size, 3 * state.inner, bias=state.proj_bias)
        self.conv = Convolution(state.inner, state.conv_kernel, bias=state.conv_bias)
        self.o = Linear(state.inner, spec.hidden_size, bias=state.proj_bias)

    def prepare(self, ops: Ops) -> None:
        """See `Attention.prepare`: there is nothing."""

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        own = cache.state
        assert own is not None
        before, behind, x = qkv.chunk(3, dim=1)
        states = context.attention.states(own.group)
        return behind * states.conv(before * x, self.conv.weight[:, 0], self.conv.bias, own, silu=False)


class Lfm2(Hybrid):
    classes = LayerClasses(HybridLayer, state=ShortConvolution)


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
