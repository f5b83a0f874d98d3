"""Ministral 3: queries grow with their position, q (1 + beta log(1 + floor(position / original context)))."""

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.models.decoder import Attention, Decoder, LayerClasses


class GrowingAttention(Attention):
    """A rotation keeps what a query is multiplied by, so that comes first."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self._queries = spec.num_attention_heads * self.head_dim

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        if self._spec.attn_temperature is not None:
            scale, floor = self._spec.attn_temperature
            grown = torch.log1p(torch.floor(context.batch.positions.float() / floor)) * scale + 1.0
            qkv[:, : self._queries] *= grown[:, None].to(qkv.dtype)
        return super().attend(qkv, cache, context)


class Ministral3(Decoder):
    classes = LayerClasses(attention=GrowingAttention)
