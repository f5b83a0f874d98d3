"""DeepSeek-V2 and V3: multi-head latent attention (kernels/mla/kernel.py has the formula), and experts from some layer on.

    c_q = norm(W_DQ x);  q = W_UQ c_q          (without q_lora_rank: q = W_Q x)
    (c, r) = W_DKV x;    what is cached of a token: norm(c) and the rotated r, once for all heads

The product behind the layer's norm is W_DQ (or W_Q) and W_DKV in one. Tensor ranks have some of the heads each, and all of them the
whole latent.
"""

from torch import Tensor

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec, RopeSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.linear import Linear, Matrix
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import LatentShape, LayerStep, Ops
from meshlm.workers.layers.rope import yarn_mscale
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
