"""Phi-3.5-MoE: layer norms, and two experts of each token, chosen by SparseMixer (Liu et al. 2023).

The first has the greatest score, the second the greatest of the others. An expert's weight is its softmax among those that were
left to choose from and are near it: of which (best - s) / max(|s|, best) is at most twice the jitter of the training. So the two
weights need not sum to 1.
"""

import torch
from torch import Tensor

from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.moe import MoE
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import LayerClasses
from meshlm.workers.models.layer_norm import LayerNormAttention, LayerNormDecoder, LayerNormLayer
from meshlm.workers.moe.parts import NOWHERE, Routing
from meshlm.workers.partial_sum import PartialSum


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
        found, _ = self.fused.forward(y, sparse_mixer(logits, self.moe.sparse_mixer, slots))
        return found


class PhiMoELayer(LayerNormLayer):
    """Attention behind a norm, experts behind another."""

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
    classes = LayerClasses(PhiMoELayer, LayerNormAttention, experts=SparseMixerMoE)
