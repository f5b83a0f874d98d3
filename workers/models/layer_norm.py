"""GPT-2 and what came of it, Command R, StarCoder2: norms take off the mean, too (Ba et al. 2016), which no fused kernel does.

    one after the other:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    beside one another:   x = x + attention(norm(x)) + mlp(norm(x)), by one norm or by two
    norms behind:         x = norm(x + attention(x));  x = norm(x + mlp(x))

`ModelSpec.layer_norms` says which, and what stands before the first layer and behind the last.

Phi-3.5-MoE: layer norms, and two experts of each token, chosen by SparseMixer (Liu et al. 2023).

The first has the greatest score, the second the greatest of the others. An expert's weight is its softmax among those that were
left to choose from and are near it: of which (best - s) / max(|s|, best) is at most twice the jitter of the training. So the two
weights need not sum to 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.model import LayerNormSpec, ModelSpec
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, LayerNorm, Linear, RMSNorm, parameter
from meshlm.workers.layers.moe import MoE
from meshlm.workers.layers.ops import Ops
from meshlm.workers.lora.step_adapters import LineAdapters, StepAdapters
from meshlm.workers.models.decoder import Decoder, DecoderLayer, LayerClasses
from meshlm.workers.moe.fused_moe import NOWHERE, Routing
from meshlm.workers.partial_sum import PartialSum


def _of(spec: ModelSpec) -> LayerNormSpec:
    assert spec.layer_norms is not None
    return spec.layer_norms


def _norm(spec: ModelSpec) -> LayerNorm:
    return LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias, weight=_of(spec).affine)


class UngatedMLP(MLP):
    """down(act(up(x)))."""

    def __init__(self, spec: ModelSpec, size: int | None = None) -> None:
        super().__init__(spec, size)
        del self.gate_up
        self.up = Linear(spec.hidden_size, self.down.inputs, bias=spec.mlp_bias)

    def act(self, hidden: Tensor) -> Tensor:
        return ACTIVATIONS[self._act](hidden)

    def activated(self, x: PartialSum, norm: RMSNorm, ops: Ops) -> tuple[Tensor, Tensor]:
        hidden, residual = self.up.after_norm(x, norm, ops)
        return self.act(hidden), residual

    def of_normed(self, x: Tensor, ops: Ops) -> PartialSum:
        return self.down.row_parallel(self.act(self.up(x, ops)), None, ops)


class LayerNormLayer(DecoderLayer):
    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        nn.Module.__init__(self)
        self._order = _of(spec)
        self.attention = classes.attention(spec, layer)
        mlp = classes.experts if spec.layers[layer].experts else MLP if self._order.gated else UngatedMLP
        self.mlp: MLP | MoE = mlp(spec)
        self.attention_norm = _norm(spec)
        self.mlp_norm = None if self._order.parallel == 1 else _norm(spec)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """Computes the new residual, with all that was added to it."""
        assert isinstance(self.mlp, MLP)
        hidden, ops = x.value, context.ops
        before = hidden if self._order.after else self.attention_norm(hidden)
        beside = None  # what the MLP gets, where it does not wait for attention
        if self._order.parallel:
            beside = before if self.mlp_norm is None else self.mlp_norm(hidden)
        out = self.attention.attend(self.attention.qkv(before, ops), cache, context)
        hidden.add_(ops.finish_sum(self.attention.o.row_parallel(out, None, ops), hidden.dtype))
        if beside is None:
            assert self.mlp_norm is not None
            if self._order.after:
                hidden = beside = self.attention_norm(hidden)
            else:
                beside = self.mlp_norm(hidden)
        hidden = hidden + ops.finish_sum(self.mlp.of_normed(beside, ops), hidden.dtype)
        if self._order.after:
            assert self.mlp_norm is not None
            hidden = self.mlp_norm(hidden)
        return PartialSum(hidden)


class Entry(nn.Module):
    """The modules between the embedding and the first layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        own, hidden = _of(spec), spec.hidden_size
        rows = spec.max_position_embeddings + spec.position_offset
        self.positions = parameter(rows, hidden) if own.learned_positions else None
        self.norm = LayerNorm(hidden, spec.rms_norm_eps, bias=spec.norm_bias) if own.embedding_norm else None
        self.project = Linear(own.embedding_dim, hidden, bias=False) if own.embedding_dim else None
        self._offset = spec.position_offset

    def forward(self, hidden: Tensor, batch: StepInputs) -> Tensor:
        """hidden [t, hidden]: embeddings. A padded token of a CUDA graph may have any position."""
        if self.positions is not None:
            places = (batch.positions + self._offset).clamp(0, len(self.positions) - 1)
            hidden = hidden + F.embedding(places, self.positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden


class LayerNormDecoder(Decoder):
    """See `Decoder`. Logits may have a bias."""

    classes = LayerClasses(LayerNormLayer)

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        own = _of(spec)
        self.entry = Entry(spec) if shard.is_first else None
        if shard.is_last:
            self.norm = None if own.after else _norm(spec)
        self.head_bias = parameter(spec.vocab_size) if own.head_bias and shard.is_last else None
        self.project_out: Linear | None = None
        if own.embedding_dim:
            self.embedding_size = own.embedding_dim
            for table in (self.embed, self.head):
                if table is not None:
                    table.weight = parameter(len(table.weight), own.embedding_dim)
            if shard.is_last:
                self.project_out = Linear(spec.hidden_size, own.embedding_dim, bias=False)

    def embedded(self, ids: Tensor, adapters: StepAdapters | None = None) -> tuple[PartialSum, Tensor | None]:
        found = self.embedding(ids, adapters)
        if self.entry is not None and self.entry.project is not None:
            found = self.entry.project(found, self.ops)
        return PartialSum(found), None

    def entered(self, x: PartialSum, batch: StepInputs) -> PartialSum:
        assert self.entry is not None
        return PartialSum(self.entry(x.value, batch))

    def normed(self, x: PartialSum) -> Tensor:
        assert isinstance(self.norm, LayerNorm)
        found: Tensor = self.norm(x.value)
        return found

    def projected(self, hidden: Tensor, out: Tensor | None, adapters: LineAdapters | None = None) -> Tensor:
        """See `Decoder.projected`; logits may have a bias."""
        if self.project_out is not None:
            hidden = self.project_out(hidden, self.ops)
        found: Tensor = super().projected(hidden, out, adapters)
        if self.head_bias is not None:
            found.add_(self.head_bias)
        return found


def sparse_mixer(logits: Tensor, jitter: float, slots: Tensor) -> Routing:
    """logits [m, experts]; tokens with a negative slot go nowhere."""
    scores = logits.float()
    left, experts, weights = scores, [], []
    for _ in range(2):
        best, expert = left.max(dim=-1, keepdim=True)
        far = (best - scores) / scores.abs().clamp(min=best) > 2 * jitter
        experts.append(expert)
        weights.append(left.masked_fill(far, -torch.inf).softmax(dim=-1).gather(-1, expert))
        left = left.scatter(-1, expert, -torch.inf)
    padding = (slots < 0)[:, None]
    chosen = torch.cat(experts, dim=-1).masked_fill(padding, NOWHERE).to(torch.int32)
    return Routing(chosen, torch.cat(weights, dim=-1).masked_fill(padding, 0.0))


class SparseMixerMoE(MoE):
    def of_normed(self, y: Tensor, slots: Tensor, ops: Ops) -> PartialSum:
        """The experts' sum for tokens that are normed already, without a residual."""
        logits = ops.linear(y, self.router.weight.data, None, self.moe.num_experts)
        found, _ = self.of_step(len(y), ops).forward(y, sparse_mixer(logits, self.moe.sparse_mixer, slots))
        return found


class PhiMoELayer(LayerNormLayer):
    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        assert isinstance(self.mlp, SparseMixerMoE)
        assert self.mlp_norm is not None
        hidden, ops = x.value, context.ops
        out = self.attention.attend(self.attention.qkv(self.attention_norm(hidden), ops), cache, context)
        hidden.add_(ops.finish_sum(self.attention.o.row_parallel(out, None, ops), hidden.dtype))
        found = self.mlp.of_normed(self.mlp_norm(hidden), context.batch.slot_mapping[0], ops)
        return PartialSum(hidden + ops.finish_sum(found, hidden.dtype))


class PhiMoE(LayerNormDecoder):
    classes = LayerClasses(PhiMoELayer, experts=SparseMixerMoE)
