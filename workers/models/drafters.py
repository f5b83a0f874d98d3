"""Drafters that read the states of the model that they draft for, its target.

At position p they take the token that follows, p + 1, and the target's state of p, and keep keys and values of p. What they give of it
is fed on: where a token is drafted, they run again at p + 1, with that token and their own state of p. The target's states are those
behind its last norm, as vLLM and SGLang feed them to all of these.

mtp (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; GLM-4.5 alike; Qwen3-Next and Qwen3.5 with its attention that has
a gate), of layers k = 1, 2, ..., most often one:

    h_k = norm(layer(W [enorm(embedding of token p + k); hnorm(h_(k-1) of p)])),    logits of token p + k + 1 = head h_k

h_0 is the target's state. h, behind the norm, is what is fed on: hnorm was trained on states behind a norm (SGLang's
DeepseekModelNextN; vLLM since its pull request 45895; ROCm/ATOM's 1764 has measured it for DeepSeek-R1; transformers' MtpModel). vLLM
takes zeros for the embedding at position 0; nobody else does. Behind the last layer's token that layer goes on with its own h.

EAGLE 3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"; vLLM's and
SGLang's LlamaForCausalLMEagle3): of the target's states behind three of its layers, in a first pass, W makes one state g; later g is
the drafter's own state h of the position before. Attention takes two vectors, the MLP is a layer's:

    a = g + attention [norm(embedding of token p + 1); hidden_norm(g)],    h = a + mlp(norm(a)),    logits = head norm(h)

Files with norm_before_residual have hidden_norm(g) in the place of the g that is added to. The output projection may have few tokens:
logits of the others are -inf.

EAGLE (Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"; vLLM's EagleLlamaForCausalLM):

    h = layer(W [embedding of token p + 1; state of p]) without a norm before attention,    logits = head h

Embedding and output projection are the target's (`share`), unless files of EAGLE 3 have others; checkpoints of mtp hold them twice.
"""

import torch
from torch import Tensor, nn

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import Embedding, Linear, RMSNorm, parameter
from meshlm.workers.lora.step_adapters import StepAdapters
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses
from meshlm.workers.models.deepseek import Deepseek, SparseDeepseek
from meshlm.workers.models.qwen3_next import Qwen3Next
from meshlm.workers.partial_sum import PartialSum


class StateDrafter(Decoder):
    """The common part of these drafters. `forward` takes states in the place of a pipeline's residual, and gives those that are fed
    on."""

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        self.embed = self.head = None
        # No module of this one: its parameters are counted, loaded and moved elsewhere.
        self._target: tuple[Decoder, ...] = ()
        self.taps = () if spec.draft is None else spec.draft.taps
        """What a first pass takes is the target's states behind so many layers each, beside one another (`Decoder.tap`); empty: what
        its forward gives."""

    def share(self, target: Decoder) -> None:
        """Once, before the first step: whose embedding and output projection it computes with."""
        self._target = (target,)

    def embedding(self, ids: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self._target[0].embedding(ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """States that `forward` gave, [l, hidden] -> [l, vocab of the target]."""
        return self._target[0].logits(hidden, out)


class AroundLayer(nn.Module):
    """What makes the input of a layer of mtp, and the norm behind it."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (RMSNorm(hidden, eps) for _ in range(3))
        self.eh_proj = Linear(2 * hidden, hidden, bias=False)


class NextN(StateDrafter):
    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        self.norm = None
        self.around = nn.ModuleList(AroundLayer(spec.hidden_size, spec.rms_norm_eps) for _ in spec.layers)

    def forward(
        self,
        batch: StepInputs,
        caches: list[LayerCache],
        attention: StepAttention,
        residual: Tensor | None = None,
        nth: int = 0,
    ) -> Tensor:
        """What layer number `nth` makes of states, [t, hidden] -> [t, hidden], behind its norm. residual: of the target (nth 0), of the
        layer before it, or of itself. batch: of each token's position, the id of the token that is 1 + nth further."""
        around, ops = self.around[nth], self.ops
        assert residual is not None and isinstance(around, AroundLayer)  # noqa: PT018
        both = ((self.embedding(batch.known_ids), around.enorm), (residual, around.hnorm))
        pair = [ops.rms_norm(x, norm.weight, norm.eps) for x, norm in both]
        x = PartialSum(around.eh_proj(torch.cat(pair, dim=1), ops))
        x = self.layers[nth](x, caches[nth], ForwardContext(batch, self.rope, attention, ops))
        return ops.norm(x, (around.norm.weight, around.norm.eps))[0]


class DeepseekNextN(NextN):
    classes = Deepseek.classes


class SparseDeepseekNextN(NextN):
    classes = SparseDeepseek.classes


class Qwen3NextN(NextN):
    classes = Qwen3Next.classes


class EagleLayer(DecoderLayer):
    """A layer without a norm before attention."""

    def make_norms(self, spec: ModelSpec) -> None:
        self.post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)


class Eagle(StateDrafter):
    classes = LayerClasses(EagleLayer)

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        assert spec.draft is not None
        self.norm = None
        self.fc = Linear(2 * spec.hidden_size, spec.hidden_size, bias=spec.draft.fc_bias)

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        """batch: of each token's position, the id of the token that follows. residual [t, hidden]: states of the target, or of this,
        which has no last norm."""
        ops, (layer,), (cache,) = self.ops, self.layers, caches
        assert residual is not None and isinstance(layer, DecoderLayer)  # noqa: PT018
        states = self.fc(torch.cat((self.embedding(batch.known_ids), residual), dim=1), ops)
        attended = layer.attention.attend(
            layer.attention.qkv(states, ops), cache, ForwardContext(batch, self.rope, attention, ops)
        )
        x = layer.attention.o.row_parallel(attended, states, ops)
        return self.state(layer.mlp(x, layer.post_norm, batch, ops))


class PairAttention(Attention):
    """Attention to two vectors of each token, beside one another."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().make(spec, layer)
        self.qkv = Linear(2 * spec.hidden_size, self.qkv.outputs, bias=spec.attention_bias)


class Eagle3(StateDrafter):
    classes = LayerClasses(attention=PairAttention)

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        assert spec.draft is not None
        hidden, self._draft = spec.hidden_size, spec.draft
        of_target, few = self._draft.target_hidden_size or hidden, self._draft.draft_vocab_size
        self.fc = Linear(3 * of_target, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, spec.rms_norm_eps)
        if of_target != hidden:
            begin, end, rows = shard.vocab(spec.vocab_size)
            self.embed = Embedding(rows, hidden, begin, end)
        self.draft_head = Linear(hidden, few, bias=False) if few else None
        self.d2t = parameter(few, dtype=torch.int64) if few and few < spec.vocab_size else None
        self._tokens = torch.empty(0)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """See `Decoder.prepare`. ProcessFatal: d2t names a token that is none."""
        super().prepare(device, dtype)
        if self.d2t is not None:
            self._tokens = torch.arange(len(self.d2t), device=device) + self.d2t
            if not bool(((self._tokens >= 0) & (self._tokens < self.spec.vocab_size)).all()):
                raise ProcessFatal(f"tensor d2t names tokens beyond the vocabulary, which has {self.spec.vocab_size}")

    def embedding(self, ids: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return super().embedding(ids) if self.embed is None else Decoder.embedding(self, ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `StateDrafter.logits`; -inf for tokens that it has none for."""
        assert self.norm is not None
        normed = self.ops.rms_norm(hidden, self.norm.weight, self.norm.eps)
        if self.draft_head is None:
            return super().logits(normed, out)
        found: Tensor = self.draft_head(normed, self.ops)
        whole = found.new_empty(len(found), self.spec.vocab_size) if out is None else out
        if self.d2t is None:
            return whole.copy_(found)
        return whole.fill_(float("-inf")).index_copy_(1, self._tokens, found)

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        """batch: of each token's position, the id of the token that follows. residual: [t, 3 * hidden of the target], or states
        [t, hidden] that this gave. What it gives, [t, hidden], is before the last norm."""
        ops, (layer,), (cache,) = self.ops, self.layers, caches
        assert residual is not None and isinstance(layer, DecoderLayer)  # noqa: PT018
        states = residual.clone() if residual.shape[1] == self.spec.hidden_size else self.fc(residual, ops)
        normed = ops.rms_norm(states, self.hidden_norm.weight, self.hidden_norm.eps)
        embedded = ops.rms_norm(self.embedding(batch.known_ids), layer.input_norm.weight, layer.input_norm.eps)
        pair = torch.cat((embedded, normed), dim=1)
        x = PartialSum(normed if self._draft.norm_before_residual else states)
        return self.state(layer(x, cache, ForwardContext(batch, self.rope, attention, ops), pair))
