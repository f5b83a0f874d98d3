"""Drafters that read the states of the model that they draft for, its target.

At position p they take the token that follows, p + 1, and the target's state of p, and keep keys and values of p. What they give of it
is fed on: where a token is drafted, they run again at p + 1, with that token and their own state of p. The target's states are those
behind its last norm, as vLLM and SGLang feed them to all of these.

mtp (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; GLM-4.5 alike):

    h = norm(layer(W [enorm(embedding of token p + 1); hnorm(state of p)])),    logits = head h

h, behind the norm, is what is fed on: hnorm was trained on states behind a norm (SGLang's DeepseekModelNextN; vLLM since its pull
request 45895; ROCm/ATOM's 1764 has measured it for DeepSeek-R1). vLLM takes zeros for the embedding at position 0; nobody else does.

Embedding and output projection are the target's (`share`); checkpoints of mtp hold them twice.
"""

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import Linear, RMSNorm
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.deepseek import Deepseek, SparseDeepseek
from meshlm.workers.partial_sum import PartialSum


class StateDrafter(Decoder):
    """What these drafters have in common. `forward` takes states in the place of a pipeline's residual, and gives those that are fed
    on."""

    taps: tuple[int, ...] = ()
    """Of the target: the states behind so many of its layers each stand beside one another in what a first pass takes (`Decoder.tap`);
    empty: it takes what the target's forward gives."""

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        self.embed = self.head = None
        self._target: tuple[
            Decoder, ...
        ] = ()  # no module of this one: its parameters are counted, loaded and moved elsewhere

    def share(self, target: Decoder) -> None:
        """Once, before the first step: whose embedding and output projection it computes with."""
        self._target = (target,)

    def embedding(self, ids: Tensor) -> Tensor:
        return self._target[0].embedding(ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """States that `forward` gave, [l, hidden] -> [l, vocab of the target]."""
        return self._target[0].logits(hidden, out)


class NextN(StateDrafter):
    """mtp, see the module docstring."""

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        self.enorm, self.hnorm = (RMSNorm(spec.hidden_size, spec.rms_norm_eps) for _ in range(2))
        self.eh_proj = Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        """batch: of each token's position, the id of the token that follows. residual [t, hidden]: states of the target, or of this.
        What it gives, [t, hidden], is behind the last norm."""
        assert residual is not None
        ops, embedded = self.ops, self.embedding(batch.known_ids)
        pair = [ops.rms_norm(x, norm.weight, norm.eps) for x, norm in ((embedded, self.enorm), (residual, self.hnorm))]
        x = PartialSum(self.eh_proj(torch.cat(pair, dim=1), ops))
        (layer,), (cache,) = self.layers, caches
        return self.normed(layer(x, cache, ForwardContext(batch, self.rope, attention, ops)))


class DeepseekNextN(NextN):
    classes = Deepseek.classes


class SparseDeepseekNextN(NextN):
    classes = SparseDeepseek.classes
