"""Qwen3-Next (Qwen 2025): the gated delta net (kernels/gated_delta/reference.py has the formula), and attention with a gate.

    q, k, v, z, b, a = W_in u;   q, k, v = silu(conv(q, k, v));   o = delta rule of q, k, v, a, b, rate = -exp(A) and bias;
    W_out (norm(o) silu(z)), the norm of each head for itself

Rows of W_in stand by heads of keys: its query, its key, and the values and gates of the heads that share it.

Qwen3.5 (Qwen 2026): as Qwen3-Next, with the rows of a mixer's products by kind: q, k, v, z, b, a.
"""

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


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate, which q_proj gives behind each head's query."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().make(spec, layer)
        self._gated = spec.num_attention_heads * self.head_dim
        width = 2 * self._gated + 2 * self.kv_heads * self.head_dim
        self.qkv = Linear(spec.hidden_size, width, bias=spec.attention_bias)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        both = qkv[:, : 2 * self._gated].unflatten(1, (-1, 2, self.head_dim))
        query, gate = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
        plain = torch.cat((query, qkv[:, 2 * self._gated :]), dim=1)
        found: Tensor = super().attend(plain, cache, context)
        return found.mul_(gate.sigmoid())


class GatedDeltaNet(Attention):
    """See the module docstring. `qkv` is the product behind the layer's norm."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        state = layer.state
        assert state is not None
        self._state, self._each = state, state.num_heads // state.n_groups
        self._keys = state.n_groups * state.state_size
        self._sizes = [2 * self._keys + 2 * state.inner, 2 * state.num_heads]
        self.qkv = Linear(spec.hidden_size, sum(self._sizes), bias=False)
        self.conv = Convolution(state.conv_dim, state.conv_kernel, bias=False)
        self.dt_bias, self.a_log = float_parameter(state.num_heads), float_parameter(state.num_heads)
        self.gated_norm = RMSNorm(state.head_dim, spec.rms_norm_eps)
        self.o = Linear(state.inner, spec.hidden_size, bias=False)
        self._rate = torch.empty(0)

    def prepare(self, ops: Ops) -> None:
        self._rate = -self.a_log.exp()

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The product as q, k and v beside one another [tokens, conv_dim], z [tokens, inner], b and a [tokens, num_heads]."""
        state, each = self._state, self._each
        wide, narrow = (part.unflatten(1, (state.n_groups, -1)) for part in qkv.split(self._sizes, dim=1))
        sizes = [state.state_size, state.state_size, each * state.head_dim, each * state.head_dim]
        *inputs, z = (part.flatten(1) for part in wide.split(sizes, dim=2))
        # flatten leaves steps of two if each is 1
        b, a = (part.flatten(1).contiguous() for part in narrow.split(each, dim=2))
        return torch.cat(inputs, dim=1), z, b, a

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        state, own = self._state, cache.state
        assert own is not None
        states = context.attention.states(own.group)
        inputs, z, b, a = self.parts(qkv)
        mixed = states.conv(inputs, self.conv.weight[:, 0], None, own)
        query, key, value = mixed.split([self._keys, self._keys, state.inner], dim=1)
        query, key = (part.unflatten(1, (state.n_groups, -1)) for part in (query, key))
        heads = value.unflatten(1, (state.num_heads, -1))
        out = states.gated_delta(query, key, heads, a, b, self._rate, self.dt_bias, own)
        norm = self.gated_norm
        return context.ops.gated_norm(out.flatten(1), z, norm.weight, norm.eps, state.head_dim, before=True)


class Qwen3Next(Hybrid):
    classes = LayerClasses(HybridLayer, GatedAttention, GatedDeltaNet)


class FlatGatedDeltaNet(GatedDeltaNet):
    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = self._state
        inputs, z, b, a = torch.split(qkv, [state.conv_dim, state.inner, state.num_heads, state.num_heads], dim=1)
        return inputs, z, b, a


class Qwen3_5(Hybrid):
    classes = LayerClasses(HybridLayer, GatedAttention, FlatGatedDeltaNet)
