"""The common base of encoders: no KV cache, no output projection, and perhaps a classifier of pooled states.

An encoder is what the engine knows as a `Decoder`: it has layers, and gives the hidden states of a step's tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.communicator import SINGLE_RANK, Communicator
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import LayerNorm, Linear
from meshlm.workers.layers.ops import AttentionShape, LayerStep, Ops, TorchOps, make_ops
from meshlm.workers.models.classifier import FUNCTIONS, Classifier
from meshlm.workers.models.decoder import Decoder, KVScale, LayerExecutor

NOT_ROTATED = torch.empty(0)


class Table(nn.Module):
    """Rows that ids name. Not nn.Embedding: see decoder.py."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class MaskedHead(nn.Module):
    """The head of a masked language model, before the table of words: norm(act(transform(h)))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.transform = Linear(spec.hidden_size, spec.hidden_size, bias=True)
        self.norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)
        self.bias = nn.Parameter(torch.empty(spec.vocab_size), requires_grad=False)
        self._act = FUNCTIONS[spec.hidden_act]

    def forward(self, states: Tensor, words: Tensor, ops: Ops) -> Tensor:
        """states [n, hidden] -> logits [n, vocab]; words [vocab, hidden]."""
        return F.linear(self.norm(self._act(self.transform(states, ops))), words, self.bias)


class EncoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.qkv = Linear(hidden, 3 * hidden, bias=spec.attention_bias)
        self.o = Linear(hidden, hidden, bias=spec.output_bias)
        self.down = Linear(spec.intermediate_size, hidden, bias=spec.mlp_bias)
        self.heads = AttentionShape(
            spec.num_attention_heads, spec.num_attention_heads, spec.head_dim, None, spec.rms_norm_eps, 0.0
        )
        self.scale, self.window = spec.head_dim**-0.5, 0
        self.act = FUNCTIONS[spec.hidden_act]

    def attended(self, x: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        """Computes what attention adds. The context's table of the rotation is empty where positions are not rotated."""
        step = LayerStep(context.ops, context.batch, context.rope, cache)
        out = context.attention.attend(self.qkv(x, context.ops), step, self.heads, self.scale, self.window)
        found: Tensor = self.o(out.flatten(1), context.ops)
        return found


class Encoder(Decoder, ABC):
    """The frame that a family fills: `make` makes its modules, `encode` computes a step."""

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        nn.Module.__init__(self)
        self.spec, self.shard, self.local = spec, shard, shard.local(spec)
        self.comm: Communicator = SINGLE_RANK
        self.ops: Ops = TorchOps()
        self.executor: LayerExecutor | None = None
        self._max_len = max_len
        self.word_embeddings = Table(spec.vocab_size, spec.hidden_size)
        self.embedding_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)
        self.make(spec)
        self.masked = MaskedHead(spec) if spec.lexical == "splade" else None
        self.projection = Table(spec.projection, spec.hidden_size) if spec.projection else None
        self.classifier = Classifier(spec, spec.head) if spec.head is not None else None

    @abstractmethod
    def make(self, spec: ModelSpec) -> None:
        """Makes what is between the embeddings and the classifier, `layers` among it."""

    @abstractmethod
    def encode(self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention) -> Tensor:
        """Hidden states [t, hidden] of the last layer."""

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.ops = make_ops(device, dtype) if device.type == "cpu" else TorchOps()  # there are no steps of few rows
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare(self.ops)

    def join(self, comm: Communicator) -> None:
        self.comm = comm

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        if self.executor is not None:
            return self.executor.run(self, batch, caches, attention)
        return self.encode(batch, caches, attention)

    @contextmanager
    def shortened(self) -> Iterator[int]:
        yield len(self.layers)

    def token_projection(self) -> Tensor | None:
        return None if self.projection is None else self.projection.weight.data

    def masked_logits(self, states: Tensor) -> Tensor:
        """States of any float dtype [n, hidden] -> logits [n, vocab] in the model's, of a model that has this head."""
        assert self.masked is not None
        words = self.word_embeddings.weight
        found: Tensor = self.masked(states.to(words.dtype), words, self.ops)
        return found

    def kv_scales(self) -> list[KVScale]:
        return [(None, None)] * len(self.layers)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """An encoder gives no token: what its start warms up with a row gets zeros."""
        return hidden.new_zeros(len(hidden), self.spec.vocab_size)
