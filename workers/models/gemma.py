"""Gemma: embeddings are scaled. Gemma 2 and 3: what attention and MLP give is normed before it is added, logits may be capped softly.

    x = x + norm(attention(norm(x)));  x = x + norm(mlp(norm(x)))

The weights of norms are 1 + w of the checkpoint and stay in float32: w is small, and bfloat16 keeps little of it beside 1.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.mlp import MLP
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.models.decoder import Decoder, DecoderLayer, LayerClasses
from meshlm.workers.partial_sum import PartialSum


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

    def embedded(self, ids: Tensor) -> tuple[PartialSum, Tensor | None]:
        return PartialSum(self.embedding(ids)), None


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

    def embedded(self, ids: Tensor) -> tuple[PartialSum, Tensor | None]:
        """Scaled by the root of their size, which is rounded to their dtype first."""
        return PartialSum(self.embedding(ids).mul_(self._embedding_scale)), None


class ScaledLayer(DecoderLayer):
    """A plain layer, of a model that is more than its layers: nothing that knows plain decoders alone may take it for one."""


class Gemma1(Gemma):
    """Gemma 1: see `Gemma`; its layers have no norms behind attention and MLP."""

    classes = LayerClasses(ScaledLayer)
