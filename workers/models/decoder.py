"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: pre-norm attention and gated MLP.

Plain torch modules; `ForwardBatch` says everything about a step. Query, key and value projections are one product, gate and up
projections another.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.batch import ForwardBatch, LayerCache
from meshlm.workers.layers.rope import apply_rope, rope_table

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019); statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.requires_grad_(False)
    return layer


class Attention(nn.Module):
    """Grouped-query self-attention over the paged cache."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
        )
        self.window = spec.sliding_window if not spec.sliding_layers or spec.sliding_layers[layer] else 0
        self.scale = spec.head_dim**-0.5
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = _linear(spec.hidden_size, width, bias=spec.attention_bias)
        self.o = _linear(self.num_heads * self.head_dim, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = RMSNorm(self.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, spec.rms_norm_eps) if spec.qk_norm else None

    def forward(
        self, x: Tensor, batch: ForwardBatch, cos: Tensor, sin: Tensor, cache: LayerCache, attention: TorchAttention
    ) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        rotated = self.num_heads + self.num_kv_heads
        both, value = heads[:, :rotated], heads[:, rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            both = torch.cat((self.q_norm(both[:, : self.num_heads]), self.k_norm(both[:, self.num_heads :])), dim=1)
        both = apply_rope(both, cos, sin)
        keys, values = cache.flat()
        keys.index_copy_(0, batch.slot_mapping, both[:, self.num_heads :])
        values.index_copy_(0, batch.slot_mapping, value)
        out = attention.run(both[:, : self.num_heads], cache, self.scale, self.window)
        result: Tensor = self.o(out.flatten(1))
        return result


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = _linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = _linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.act = ACTIVATIONS[spec.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.down(self.act(gate) * up)
        return result


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the stream."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(spec, layer)
        self.post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(
        self, x: Tensor, batch: ForwardBatch, cos: Tensor, sin: Tensor, cache: LayerCache, attention: TorchAttention
    ) -> Tensor:
        x = x + self.attention(self.input_norm(x), batch, cos, sin, cache, attention)
        result: Tensor = x + self.mlp(self.post_norm(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, spec: ModelSpec, max_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.embed.requires_grad_(False)
        self.layers = nn.ModuleList(DecoderLayer(spec, layer) for layer in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.head = None if spec.tie_word_embeddings else _linear(spec.hidden_size, spec.vocab_size, bias=False)
        self._max_len = max_len
        self._rope = torch.empty(0)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """After loading: what is computed once."""
        self._rope = rope_table(self.spec, self._max_len).to(device=device, dtype=dtype)

    def forward(self, batch: ForwardBatch, caches: list[LayerCache], attention: TorchAttention) -> Tensor:
        """Hidden states [t, hidden] after the last norm."""
        table = self._rope[batch.positions]
        half = table.shape[1] // 2
        cos, sin = table[:, None, :half], table[:, None, half:]
        x = self.embed(batch.input_ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, batch, cos, sin, cache, attention)
        result: Tensor = self.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """[l, hidden] -> [l, vocab]."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return F.linear(hidden, weight)
