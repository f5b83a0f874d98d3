"""BERT, RoBERTa and XLM-R: x = norm(x + attention(x)); x = norm(x + down(act(up(x)))).
ModernBERT: x = x + attention(norm(x)); x = x + down(act(gate) * up) of norm(x); and a norm behind the last layer.
"""

import torch
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import LayerNorm, Linear
from meshlm.workers.layers.rope import rope_table
from meshlm.workers.models.encoder import NOT_ROTATED, Encoder, EncoderLayer, Table


class BertLayer(EncoderLayer):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.up = Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.attention_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)
        self.mlp_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)

    def forward(self, x: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        ops = context.ops
        x = self.attention_norm(self.attended(x, cache, context).add_(x))
        found: Tensor = self.mlp_norm(self.down(self.act(self.up(x, ops)), ops).add_(x))
        return found


class Bert(Encoder):
    def make(self, spec: ModelSpec) -> None:
        self.position_embeddings = Table(spec.max_position_embeddings + spec.position_offset, spec.hidden_size)
        self.token_type_embeddings = Table(spec.type_vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(BertLayer(spec) for _ in range(spec.num_hidden_layers))

    def embeddings(self, batch: StepInputs) -> Tensor:
        """The sum of the embeddings of tokens, positions and types, normed: [t, hidden]."""
        x: Tensor = self.word_embeddings(batch.input_ids)
        x += self.position_embeddings(batch.positions + self.spec.position_offset)
        types = batch.token_types
        x += self.token_type_embeddings.weight[0] if types is None else self.token_type_embeddings(types)
        found: Tensor = self.embedding_norm(x)
        return found

    def encode(self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention) -> Tensor:
        x = self.embeddings(batch)
        context = ForwardContext(batch, NOT_ROTATED, attention, self.ops)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, context)
        return x


class ModernBertLayer(EncoderLayer):
    """A layer norm stands before attention, but for the first layer's, and before the gated MLP."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec)
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        attention = spec.layers[layer].attention
        assert attention is not None
        self.window = attention.sliding_window
        norms = [LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias) for _ in range(2 if layer else 1)]
        self.mlp_norm = norms[0]
        self.attention_norm = norms[1] if layer else None

    def forward(self, x: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        ops = context.ops
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = x + self.attended(normed, cache, context)
        gate, up = self.gate_up(self.mlp_norm(x), ops).chunk(2, dim=-1)
        return x.add_(self.down(self.act(gate).mul_(up), ops))


class ModernBert(Encoder):
    def make(self, spec: ModelSpec) -> None:
        self.layers = nn.ModuleList(ModernBertLayer(spec, layer) for layer in range(spec.num_hidden_layers))
        self.final_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)
        self._tables: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))  # of layers that see all, and the others

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        super().prepare(device, dtype)
        spec = self.spec
        self._tables = (
            rope_table(spec, self._max_len).to(device=device),
            rope_table(spec, self._max_len, spec.sliding_rope).to(device=device),
        )

    def encode(self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention) -> Tensor:
        x = self.embedding_norm(self.word_embeddings(batch.input_ids))
        contexts = [ForwardContext(batch, table, attention, self.ops) for table in self._tables]
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, ModernBertLayer)
            x = layer(x, cache, contexts[1 if layer.window else 0])
        found: Tensor = self.final_norm(x)
        return found
