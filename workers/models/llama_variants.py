"""HunYuan dense: query and key heads are normed behind their rotation.

    q = norm(rotate(q));  k = norm(rotate(k))

Kernels norm before they rotate, so both are done here, and what attends gets a table that turns nothing.

Llama 4: heads of layers with positions are normed without a weight, queries of the others grow with their position.

    q = q (1 + scale log(1 + floor((position + 1) / floor)))

Files norm heads behind their rotation; that turns a vector and keeps its length, so here it is before it, as everywhere else.

Ministral 3: queries grow with their position, q (1 + beta log(1 + floor(position / original context))).

AFM: an MLP without a gate, down(relu(up(x))^2).

Apertus: the same, down(xielu(up(x))).

    xielu(x) = p x^2 + b x                         where x > 0
               n (exp(min(x, e)) - 1 - x) + b x    elsewhere           (Huang and Schlag 2024)

p = softplus(alpha_p), n = b + softplus(alpha_n); alpha_p, alpha_n, b and e are a layer's own, and stay in float32.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.layers.rope import apply_rope
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses
from meshlm.workers.models.layer_norm import UngatedMLP


class NormedBehindRotation(Attention):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self._sizes = [heads * self.head_dim for heads in (spec.num_attention_heads, self.kv_heads)]
        self.rotates = False  # what attends gets a table that turns nothing

    def prepare(self, ops: Ops) -> None:
        super().prepare(ops)
        assert self._heads is not None
        self._heads = replace(self._heads, norms=None)

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


class Arcee(Decoder):
    classes = LayerClasses(mlp=UngatedMLP)


class HunYuan(Decoder):
    classes = LayerClasses(attention=NormedBehindRotation)


class GrowingAttention(Attention):
    """A rotation keeps what a query is multiplied by, so that comes first."""

    def grow(self, qkv: Tensor, position: Tensor) -> None:
        """Multiplies the queries, as they grow with their position [t]."""
        if self._spec.attn_temperature is not None:
            scale, floor = self._spec.attn_temperature
            grown = torch.log1p(torch.floor(position / floor)) * scale + 1.0
            qkv[:, : self._spec.num_attention_heads * self.head_dim] *= grown[:, None].to(qkv.dtype)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        self.grow(qkv, context.batch.positions.float())
        return super().attend(qkv, cache, context)


class Ministral3(Decoder):
    classes = LayerClasses(attention=GrowingAttention)


class Llama4Attention(GrowingAttention):
    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().make(spec, layer)
        self._dtype = torch.get_default_dtype()  # the model's, while it is made
        self.q_norm = self.k_norm = None  # without weights: see prepare

    def prepare(self, ops: Ops) -> None:
        super().prepare(ops)
        spec, shape = self._spec, self._heads
        if shape is not None and spec.qk_norm and self.rotates:
            ones = torch.ones(self.head_dim, dtype=self._dtype, device=self.o.weight.device)
            self._heads = replace(shape, norms=(ones, ones))

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        if not self.rotates:
            self.grow(qkv, context.batch.positions.float() + 1.0)
        return Attention.attend(self, qkv, cache, context)


class Llama4(Decoder):
    classes = LayerClasses(attention=Llama4Attention)


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

    def _loaded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n), self.beta, self.eps

    def act(self, hidden: Tensor) -> Tensor:
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
