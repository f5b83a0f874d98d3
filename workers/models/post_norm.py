"""OLMo 2 and 3, EXAONE 4: nothing is normed before attention and MLP, and what they give is normed before it is added.

    x = x + norm(attention(x));  x = x + norm(mlp(x))

OLMoE: a layer is Llama's, its attention OLMo 2's, of which queries, keys and values may be clipped.
"""

import torch
from torch import Tensor

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.communicator import SINGLE_RANK, Communicator
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.lora.step_adapters import StepAdapters
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses
from meshlm.workers.partial_sum import PartialSum


class PostNormLayer(DecoderLayer):
    def make_norms(self, spec: ModelSpec) -> None:
        self.attention_out_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp_out_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """Computes the new residual, with all that was added to it."""
        assert normed is None
        assert x.residual is None
        assert isinstance(self.mlp, MLP)
        hidden, ops = x.value, context.ops
        out = self.attention.attend(self.attention.qkv(hidden, ops), cache, context)
        hidden.add_(_normed(self.attention.o.row_parallel(out, None, ops), hidden, self.attention_out_norm, ops))
        hidden.add_(_normed(self.mlp.of_normed(hidden, ops), hidden, self.mlp_out_norm, ops))
        return PartialSum(hidden)


def _normed(x: PartialSum, residual: Tensor, norm: RMSNorm, ops: Ops) -> Tensor:
    return ops.rms_norm(ops.finish_sum(x, residual.dtype), norm.weight, norm.eps)


class PostNorm(Decoder):
    classes = LayerClasses(PostNormLayer)

    def embedded(self, ids: Tensor, adapters: StepAdapters | None = None) -> tuple[PartialSum, Tensor | None]:
        return PartialSum(self.embedding(ids, adapters)), None


def _sum_squares_over(comm: Communicator, model: Decoder) -> None:
    for attention in (module for module in model.modules() if isinstance(module, OlmoAttention)):
        attention.comm, attention.ranks = comm, model.shard.tp_size


class OlmoAttention(Attention):
    """All query heads are normed as one vector, all key heads as another. Ranks have some of the heads each, and sum squares."""

    comm: Communicator = SINGLE_RANK
    ranks = 1

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().make(spec, layer)
        self._sizes = [heads * self.head_dim for heads in (spec.num_attention_heads, self.kv_heads)]
        self.query_norm, self.key_norm = (RMSNorm(size, spec.rms_norm_eps) for size in self._sizes)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        ops = context.ops
        query, key, value = qkv.split([*self._sizes, self._sizes[1]], dim=-1)
        if self.ranks == 1:
            query = ops.rms_norm(query.contiguous(), self.query_norm.weight, self.query_norm.eps)
            key = ops.rms_norm(key.contiguous(), self.key_norm.weight, self.key_norm.eps)
        else:
            squares = torch.stack([part.float().square().mean(-1) for part in (query, key)], dim=-1)
            means = self.comm.all_reduce(squares) / self.ranks  # ranks have equal parts, of shared key heads too
            by_query, by_key = (means + self.query_norm.eps).rsqrt().split(1, dim=-1)
            query = (query.float() * by_query * self.query_norm.weight).to(qkv.dtype)
            key = (key.float() * by_key * self.key_norm.weight).to(qkv.dtype)
        return super().attend(torch.cat((query, key, value), dim=-1), cache, context)


class Olmo(PostNorm):
    classes = LayerClasses(PostNormLayer, OlmoAttention)

    def join(self, comm: Communicator) -> None:
        super().join(comm)
        _sum_squares_over(comm, self)


class Olmoe(Decoder):
    classes = LayerClasses(attention=OlmoAttention)

    def join(self, comm: Communicator) -> None:
        super().join(comm)
        _sum_squares_over(comm, self)
