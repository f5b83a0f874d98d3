"""DeepSeek-V2 and V3: multi-head latent attention (kernels/mla/kernel.py has the formula), and experts from some layer on.

    c_q = norm(W_DQ x);  q = W_UQ c_q          (without q_lora_rank: q = W_Q x)
    (c, r) = W_DKV x;    what is cached of a token: norm(c) and the rotated r, once for all heads

The product behind the layer's norm is W_DQ (or W_Q) and W_DKV in one. Tensor ranks have some of the heads each, and all of them the
whole latent.

DeepSeek-V3.2's sparse attention (DeepSeek-AI 2025, section 2.1): a query attends to the tokens that an index likes best.

    index of query t and token s:  sum over heads h of  w_th relu(q_th . k_s),   q = W_q c_q,  k = norm(W_k x),  w = W_w x

The key of the index stands behind the token's latent in the cache. Tensor ranks have the whole index each, and choose alike. The
published code multiplies q and k by a Hadamard matrix, which leaves their product as it is, and rounds both to 8 bits, which we do not.
"""

from torch import Tensor, nn

from meshlm.protocol.layers import LayerSpec, MLASpec
from meshlm.protocol.model import ModelSpec, RopeSpec
from meshlm.workers.attention.sparse_latent import Chosen, LastChoice
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import LayerNorm, Linear, Matrix, RMSNorm
from meshlm.workers.layers.ops import LatentShape, LayerStep, Ops
from meshlm.workers.layers.rope import apply_rope, apply_rope_to_neighbours, yarn_mscale
from meshlm.workers.models.decoder import Attention, Decoder, LayerClasses
from meshlm.workers.partial_sum import PartialSum

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


class LatentAttention(Attention):
    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        assert layer.attention is not None
        assert layer.attention.mla is not None
        self.mla = mla = layer.attention.mla
        heads, hidden = spec.num_attention_heads, spec.hidden_size
        self.scale = self.head_dim**-0.5 * mscale(spec.rope) ** 2
        self.q_b: Linear | None = None
        self._width = heads * self.head_dim  # of the queries, or of their latent
        if mla.q_lora_rank:
            self._width = mla.q_lora_rank
            self.q_a_norm = RMSNorm(mla.q_lora_rank, LATENT_EPS)
            self.q_b = Linear(mla.q_lora_rank, heads * self.head_dim, bias=False)
        self.qkv = Linear(hidden, self._width + mla.down, bias=False)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, LATENT_EPS)
        self.kv_b = Matrix(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.o = Linear(heads * mla.v_head_dim, hidden, bias=False)
        self._latent: LatentShape | None = None

    def prepare(self, ops: Ops) -> None:
        mla = self.mla
        sizes = (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
        self._latent = LatentShape(self.kv_b.weight, sizes, (self.kv_norm.weight, self.kv_norm.eps), ops)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        assert self._latent is not None
        query, latent = qkv[:, : self._width], qkv[:, self._width :]
        if self.q_b is not None:
            query, _ = self.q_b.after_norm(PartialSum(query.contiguous()), self.q_a_norm, context.ops)
        heads = query.view(len(query), -1, self.head_dim)
        step = LayerStep(context.ops, context.batch, context.rope, cache)
        out = context.attention.attend_latent(heads, latent, step, self._latent, self.scale)
        return out.flatten(1)


def mscale(rope: RopeSpec) -> float:
    """The factor by which YaRN lengthens queries and keys beside the one on their rotation."""
    return yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.rope_type == "yarn" and rope.mscale_all_dim else 1.0


class Deepseek(Decoder):
    classes = LayerClasses(attention=LatentAttention)


_EPS = 1e-6


class Index(nn.Module):
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
