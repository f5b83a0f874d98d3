"""HunYuan dense: query and key heads are normed behind their rotation.

    q = norm(rotate(q));  k = norm(rotate(k))

Kernels norm before they rotate, so both are done here, and what attends gets a table that turns nothing.
"""

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import AttentionShape, Ops
from meshlm.workers.layers.rope import apply_rope
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses


class NormedBehindRotation(Attention):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self._sizes = [heads * self.head_dim for heads in (spec.num_attention_heads, self.kv_heads)]

    def prepare(self, ops: Ops) -> None:
        super().prepare(ops)
        shape = self._heads
        assert shape is not None
        self._heads = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, None, shape.eps)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None  # noqa: PT018
        query, key, value = qkv.split([*self._sizes, self._sizes[1]], dim=-1)
        cos, sin = context.rope[context.batch.positions].unsqueeze(1).chunk(2, dim=-1)
        turned = [self._turned(query, self.q_norm, cos, sin), self._turned(key, self.k_norm, cos, sin)]
        return super().attend(torch.cat((*turned, value), dim=-1), cache, context)

    def _turned(self, heads: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
        """heads [t, h d] -> the same, rotated and normed head by head; in float32 in between."""
        found = apply_rope(heads.unflatten(-1, (-1, self.head_dim)).float(), cos, sin)
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + norm.eps)
        return (found * norm.weight.float()).flatten(1).to(heads.dtype)


class HunYuan(Decoder):
    classes = LayerClasses(attention=NormedBehindRotation)

    def _use_tables(self) -> None:
        """Attention turns nothing more."""
        still = torch.ones_like(self.rope)
        still[:, still.shape[1] // 2 :] = 0
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.attention.table = still
