"""HunYuan dense: query and key heads are normed behind their rotation.

    q = norm(rotate(q));  k = norm(rotate(k))

Kernels norm before they rotate, so both are done here, and what attends gets a table that turns nothing.

Llama 4: heads of layers with positions are normed without a weight, queries of the others grow with their position.

    q = q (1 + scale log(1 + floor((position + 1) / floor)))

Files norm heads behind their rotation; that turns a vector and keeps its length, so here it is before it, as everywhere else.

Ministral 3: queries grow with their position, q (1 + beta log(1 + floor(position / original context))).

Apertus: an MLP without a gate, down(xielu(up(x))).

    xielu(x) = p x^2 + b x                         where x > 0
               n (exp(min(x, e)) - 1 - x) + b x    elsewhere           (Huang and Schlag 2024)

p = softplus(alpha_p), n = b + softplus(alpha_n); alpha_p, alpha_n, b and e are a layer's own, and stay in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import RMSNorm
from meshlm.workers.layers.ops import AttentionShape, Ops
from meshlm.workers.layers.rope import apply_rope
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses
from meshlm.workers.models.layer_norm import UngatedMLP
from meshlm.workers.partial_sum import PartialSum


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
        still = torch.ones_like(self.rope)
        still[:, still.shape[1] // 2 :] = 0
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.attention.table = still


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


def _number() -> nn.Parameter:
    return nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)


def _softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


class XieluMLP(UngatedMLP):
    def __init__(self, spec: ModelSpec, size: int | None = None) -> None:
        super().__init__(spec, size)
        self._given: tuple[float, ...] = ()

    def use(self, numbers: tuple[float, ...]) -> None:
        """alpha_p, alpha_n, b and e; empty: they are tensors of the checkpoint."""
        if not numbers:
            self.alpha_p, self.alpha_n, self.beta, self.eps = _number(), _number(), _number(), _number()
            return
        alpha_p, alpha_n, beta, eps = numbers
        self._given = (_softplus(alpha_p), beta + _softplus(alpha_n), beta, eps)

    def activated(self, x: PartialSum, norm: RMSNorm, ops: Ops) -> tuple[Tensor, Tensor]:
        hidden, residual = self.up.after_norm(x, norm, ops)
        return self._xielu(hidden), residual

    def of_normed(self, x: Tensor, ops: Ops) -> PartialSum:
        return self.down.row_parallel(self._xielu(self.up(x, ops)), None, ops)

    def _loaded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n), self.beta, self.eps

    def _xielu(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        p, n, beta, eps = self._given or self._loaded()
        below = (torch.expm1(x.clamp(max=eps)) - x) * n
        found = torch.where(x > 0, x * x * p, below) + x * beta
        return found.to(hidden.dtype)


class ApertusLayer(DecoderLayer):
    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        super().__init__(spec, layer, classes)
        record = spec.layers[layer].mlp
        assert isinstance(self.mlp, XieluMLP)
        assert record is not None
        self.mlp.use(record.xielu)


class Apertus(Decoder):
    classes = LayerClasses(ApertusLayer, mlp=XieluMLP)
