"""DeepSeek-V3.2's sparse attention (DeepSeek-AI 2025, section 2.1): a query attends to the tokens that an index likes best.

    index of query t and token s:  sum over heads h of  w_th relu(q_th . k_s),   q = W_q c_q,  k = norm(W_k x),  w = W_w x

The key of the index stands behind the token's latent in the cache. Tensor ranks have the whole index each, and choose alike. The
published code multiplies q and k by a Hadamard matrix, which leaves their product as it is, and rounds both to 8 bits, which we do not.
"""

from torch import Tensor, nn

from meshlm.protocol.layers import LayerSpec, MLASpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.sparse_latent import Chosen, LastChoice
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.norm import LayerNorm, RMSNorm
from meshlm.workers.layers.ops import LayerStep, Ops
from meshlm.workers.layers.rope import apply_rope, apply_rope_to_neighbours
from meshlm.workers.models.decoder import LayerClasses
from meshlm.workers.models.deepseek import Deepseek, LatentAttention
from meshlm.workers.partial_sum import PartialSum

_EPS = 1e-6


class Index(nn.Module):
    """The products of the index of one layer."""

    def __init__(self, mla: MLASpec, hidden: int) -> None:
        super().__init__()
        self._mla = mla
        self.query = Linear(mla.q_lora_rank, mla.index_n_heads * mla.index_head_dim, bias=False)
        self.key = Linear(hidden, mla.index_head_dim, bias=False)
        self.key_norm = LayerNorm(mla.index_head_dim, _EPS, bias=True)
        self.heads = Linear(hidden, mla.index_n_heads, bias=False)

    def forward(self, normed: Tensor, latent: Tensor, angles: Tensor, ops: Ops) -> Chosen:
        """normed [t, hidden]; latent [t, q_lora_rank] of the queries; angles [t, rotary]."""
        mla = self._mla
        query = self.query(latent, ops).unflatten(1, (mla.index_n_heads, mla.index_head_dim))
        key = self.key_norm(self.key(normed, ops))
        cos, sin = angles[:, None].to(key.dtype).chunk(2, dim=-1)
        turn = apply_rope_to_neighbours if mla.index_interleave else apply_rope
        for one in (query, key[:, None]):
            one[..., : mla.qk_rope_head_dim] = turn(one[..., : mla.qk_rope_head_dim], cos, sin)
        weights = self.heads(normed, ops).float() * (mla.index_n_heads * mla.index_head_dim) ** -0.5
        return Chosen(query, key, weights, mla.index_topk)


class SparseLatentAttention(LatentAttention):
    """A layer without an index attends to what the last one before it has chosen (GLM-5)."""

    index: Index | None

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().make(spec, layer)
        self.index = None if self.mla.index_shared else Index(self.mla, spec.hidden_size)

    def forward(
        self, x: PartialSum, norm: RMSNorm, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """See `Attention.forward`: the index needs what is normed, too."""
        residual = x.value
        if normed is None:
            normed, residual = context.ops.norm(x, (norm.weight, norm.eps))
        return self.o.row_parallel(self._attend(normed, cache, context), residual, context.ops)

    def _attend(self, normed: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        """[t, heads wide], before the output projection."""
        ops, batch = context.ops, context.batch
        assert self._latent is not None
        assert self.q_b is not None
        qkv = self.qkv(normed, ops)
        latent = ops.rms_norm(qkv[:, : self._width].contiguous(), self.q_a_norm.weight, self.q_a_norm.eps)
        query = self.q_b(latent, ops).view(len(qkv), -1, self.head_dim)
        chosen: Chosen | LastChoice = LastChoice()
        if self.index is not None:
            places = batch.positions.clamp(0, len(context.rope) - 1)  # compiled ahead, when nobody has written them
            chosen = self.index(normed, latent, context.rope[places], ops)
        step, latents = LayerStep(ops, batch, context.rope, cache), qkv[:, self._width :]
        found = context.attention.attend_latent(query, latents, step, self._latent, self.scale, chosen)
        return found.flatten(1)


class SparseDeepseek(Deepseek):
    classes = LayerClasses(attention=SparseLatentAttention)
