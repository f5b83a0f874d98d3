"""Llama 4: heads of layers with positions are normed without a weight, queries of the others grow with their position.

    q = q (1 + scale log(1 + floor((position + 1) / floor)))

Files norm heads behind their rotation; that turns a vector and keeps its length, so here it is before it, as everywhere else.
"""

import torch
from torch import Tensor

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.ops import AttentionShape, Ops
from meshlm.workers.models.decoder import Attention, Decoder, LayerClasses


class Llama4Attention(Attention):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self._queries = spec.num_attention_heads * self.head_dim

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().make(spec, layer)
        self._dtype = torch.get_default_dtype()  # the model's, while it is made
        self.q_norm = self.k_norm = None  # without weights: see prepare

    def prepare(self, ops: Ops) -> None:
        super().prepare(ops)
        spec, shape = self._spec, self._heads
        if shape is not None and spec.qk_norm and self.rotates:
            ones = torch.ones(self.head_dim, dtype=self._dtype, device=self.o.weight.device)
            self._heads = AttentionShape(
                shape.num_heads, shape.num_kv_heads, shape.head_dim, (ones, ones), shape.eps, chunk=shape.chunk
            )

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        if not self.rotates and self._spec.attn_temperature is not None:
            scale, floor = self._spec.attn_temperature
            grown = torch.log1p(torch.floor((context.batch.positions.float() + 1.0) / floor)) * scale + 1.0
            qkv[:, : self._queries] *= grown[:, None].to(qkv.dtype)
        return super().attend(qkv, cache, context)


class Llama4(Decoder):
    classes = LayerClasses(attention=Llama4Attention)
