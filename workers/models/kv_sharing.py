"""Attention of which the last layers use keys and values of an earlier one of their kind; values are normed without a weight.

A layer that shares gives its source's projections of a step's tokens to attention beside its own queries, which writes the same lines
again (Gemma 3n, Gemma 4).
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.ops import AttentionShape
from meshlm.workers.models.decoder import Attention, DecoderLayer

SharedKV = dict[int, Tensor]
"""Keys and values [t, 2 kv_heads d] of this step's tokens, as they are given to attention, by their layer."""


class SharingAttention(Attention):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        record = spec.layers[layer]
        assert record.attention is not None
        self.shares = record.cache_of is not None
        self.layer, self.source = layer, layer if record.cache_of is None else record.cache_of
        self.gives = layer in {other.cache_of for other in spec.layers}
        self._queries = spec.num_attention_heads * self.head_dim
        self._keys = self.kv_heads * self.head_dim
        self._keys_are_values = record.attention.keys_are_values
        if self.shares:
            self.qkv = Linear(spec.hidden_size, self._queries, bias=spec.attention_bias)
            self.k_norm = None
        elif self._keys_are_values:
            self.qkv = Linear(spec.hidden_size, self._queries + self._keys, bias=spec.attention_bias)

    def share(self, source: "SharingAttention") -> None:
        """After both were prepared: keys are normed as the source's."""
        assert source._heads is not None
        assert source.k_norm is not None
        assert self.q_norm is not None
        of = source._heads
        norms = self.q_norm.weight, source.k_norm.weight
        self._heads = AttentionShape(of.num_heads, of.num_kv_heads, of.head_dim, norms, of.eps, of.softcap)

    def attended(self, x: Tensor, cache: LayerCache, context: ForwardContext, shared: SharedKV) -> Tensor:
        """x [t, hidden], normed -> [t, heads d], before the output projection."""
        qkv = self.qkv(x, context.ops)
        if self.shares:
            qkv = torch.cat((qkv, shared[self.source]), dim=-1)
        else:
            if self._keys_are_values:
                qkv = torch.cat((qkv, qkv[:, self._queries :]), dim=-1)
            values = qkv[:, self._queries + self._keys :].unflatten(-1, (-1, self.head_dim))
            values.copy_(F.rms_norm(values.float(), values.shape[-1:], None, self._spec.rms_norm_eps))
            if self.gives:
                shared[self.layer] = qkv[:, self._queries :].clone()  # attention may rotate keys in place
        return self.attend(qkv, cache, context)


def share_all(layers: Iterable[nn.Module]) -> None:
    """After all were prepared: layers that share get what they need of their sources."""
    attentions = [layer.attention for layer in layers if isinstance(layer, DecoderLayer)]
    for attention in attentions:
        assert isinstance(attention, SharingAttention)
        source = attentions[attention.source]
        if attention.shares and isinstance(source, SharingAttention):
            attention.share(source)
