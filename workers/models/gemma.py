"""Gemma: embeddings are scaled. Gemma 2 and 3: what attention and MLP give is normed before it is added, logits may be capped softly.

    x = x + norm(attention(norm(x)));  x = x + norm(mlp(norm(x)))

The weights of norms are 1 + w of the checkpoint and stay in float32: w is small, and bfloat16 keeps little of it beside 1.

Attention of which the last layers use keys and values of an earlier one of their kind; values are normed without a weight.

A layer that shares gives its source's projections of a step's tokens to attention beside its own queries, which writes the same lines
again (Gemma 3n, Gemma 4).

A vector of each token for each layer (Gemma 3n, Gemma 4): of the token's number and of its embedding.

    e = (norm(E x / sqrt(hidden)) + table[id] * sqrt(own)) / sqrt(2)

With a tensor-parallel rank each has all of it.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec, PerLayerInputSpec
from meshlm.workers.batch import MEDIA, VECTOR, LayerCache, StepInputs
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, Embedding, Linear, RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.lora.step_adapters import StepAdapters
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses
from meshlm.workers.partial_sum import PartialSum


def norm_of(x: Tensor, norm: RMSNorm, ops: Ops) -> Tensor:
    return ops.rms_norm(x.contiguous(), norm.weight, norm.eps)


class GemmaLayer(DecoderLayer):
    """Attention and MLP, each between two norms."""

    def make_norms(self, spec: ModelSpec) -> None:
        super().make_norms(spec)
        self.attention_out_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp_out_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        assert normed is None
        ops = context.ops
        qkv, residual = self.attention.qkv.after_norm(x, self.input_norm, ops)
        out = self.attention.attend(qkv, cache, context)
        norm = self.attention_out_norm
        x = ops.own_norm(self.attention.o.row_parallel(out, None, ops), residual, (norm.weight, norm.eps))
        assert isinstance(self.mlp, MLP)
        hidden, residual = self.mlp.activated(x, self.post_norm, ops)
        norm = self.mlp_out_norm
        return ops.own_norm(self.mlp.down.row_parallel(hidden, None, ops), residual, (norm.weight, norm.eps))


class Sandwich(Decoder):
    """A decoder of such layers: GLM-4-0414. Gemma has more of its own."""

    classes: ClassVar[LayerClasses] = LayerClasses(GemmaLayer)

    def embedded(self, ids: Tensor, adapters: StepAdapters | None = None) -> tuple[PartialSum, Tensor | None]:
        return PartialSum(self.embedding(ids, adapters)), None


class Gemma(Sandwich):
    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight = nn.Parameter(module.weight.float(), requires_grad=False)
        self._embedding_scale = 1.0

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        super().prepare(device, dtype)
        self._embedding_scale = float(torch.tensor(self.spec.hidden_size**0.5, dtype=dtype))

    def embedded(self, ids: Tensor, adapters: StepAdapters | None = None) -> tuple[PartialSum, Tensor | None]:
        """Scaled by the root of their size, which is rounded to their dtype first."""
        return PartialSum(self.embedding(ids, adapters).mul_(self._embedding_scale)), None


class ScaledLayer(DecoderLayer):
    """A plain layer, of a model that is more than its layers: nothing that knows plain decoders alone may take it for one."""


class Gemma1(Gemma):
    """Gemma 1: see `Gemma`; its layers have no norms behind attention and MLP."""

    classes = LayerClasses(ScaledLayer)


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
        self._heads = replace(source._heads, norms=(self.q_norm.weight, source.k_norm.weight))

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


class PerLayerInputs(nn.Module):
    def __init__(self, sizes: PerLayerInputSpec, layers: int, hidden: int, eps: float) -> None:
        super().__init__()
        self._own, self._known = sizes.hidden_size_per_layer_input, sizes.vocab_size_per_layer_input
        self._hidden, self._padding = hidden, sizes.padding_id
        self._every = layers * self._own
        self.embed = Embedding(self._known, self._every, 0, self._known)
        self.project = Linear(hidden, layers * self._own, bias=False)
        self.norm = RMSNorm(self._own, eps)
        self._scale = 1.0

    def prepare(self, dtype: torch.dtype) -> None:
        """The scale of the table is rounded to the model's dtype first, as that of the embeddings."""
        self._scale = float(torch.tensor(self._own**0.5, dtype=dtype))

    def forward(self, x: Tensor, batch: StepInputs, ops: Ops) -> Tensor:
        """x [t, hidden]: the first layer's -> [t, layers, own]. Of tokens whose vectors came with a prompt, of these alone; an image's
        have the number of the token that pads."""
        projected = self.project(x, ops) * self._hidden**-0.5
        lines = projected.view(-1, self._own)
        projected = ops.rms_norm(lines, self.norm.weight, self.norm.eps).view(len(x), -1, self._own)
        ids = torch.where(batch.input_ids == MEDIA, self._padding, batch.known_ids)
        rows = ops.rows(torch.where(ids < self._known, ids, 0), self.embed.weight, self._every)
        rows = rows.view_as(projected) * self._scale
        both: Tensor = (projected + rows) * 2**-0.5
        return (
            both if batch.vectors is None else torch.where((batch.input_ids == VECTOR)[:, None, None], projected, both)
        )
