"""Command R and StarCoder2: norms take off the mean, too (Ba et al. 2016), which no fused kernel does.

Command R:   y = norm(x);  x = x + attention(y) + mlp(y)
StarCoder2:  x = x + attention(norm(x));  x = x + mlp(norm(x)), where mlp(y) = down(act(up(y)))
"""

from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.mlp import MLP
from meshlm.workers.layers.norm import LayerNorm
from meshlm.workers.layers.ops import ACTIVATIONS, Ops
from meshlm.workers.layers.partial_sum import PartialSum
from meshlm.workers.models.decoder import Decoder, DecoderLayer


class CohereLayer(DecoderLayer):
    """Attention and MLP beside one another."""

    def make_norms(self, spec: ModelSpec) -> None:
        """See `DecoderLayer.make_norms`."""
        self.shared_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """Computes the new residual, with all that was added to it."""
        assert isinstance(self.mlp, MLP)
        hidden, ops = x.value, context.ops
        y = self.shared_norm(hidden)
        out = self.attention.attend(self.attention.qkv(y, ops), cache, context)
        for term in (self.attention.o.row_parallel(out, None, ops), self.mlp.of_normed(y, ops)):
            hidden.add_(ops.finish_sum(term, hidden.dtype))
        return PartialSum(hidden)


class UngatedMLP(MLP):
    """down(act(up(x)))."""

    def __init__(self, spec: ModelSpec, size: int | None = None) -> None:
        super().__init__(spec, size)
        del self.gate_up
        self.up = Linear(spec.hidden_size, self.down.inputs, bias=spec.mlp_bias)

    def of_normed(self, x: Tensor, ops: Ops) -> PartialSum:
        """See `MLP.of_normed`."""
        return self.down.row_parallel(ACTIVATIONS[self._act](self.up(x, ops)), None, ops)


class Starcoder2Layer(DecoderLayer):
    """Attention, then the MLP."""

    mlp_type = UngatedMLP

    def make_norms(self, spec: ModelSpec) -> None:
        """See `DecoderLayer.make_norms`."""
        self.attention_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)
        self.mlp_norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """Computes the new residual, with all that was added to it."""
        assert isinstance(self.mlp, MLP)
        hidden, ops = x.value, context.ops
        qkv = self.attention.qkv(self.attention_norm(hidden), ops)
        out = self.attention.attend(qkv, cache, context)
        hidden.add_(ops.finish_sum(self.attention.o.row_parallel(out, None, ops), hidden.dtype))
        hidden.add_(ops.finish_sum(self.mlp.of_normed(self.mlp_norm(hidden), ops), hidden.dtype))
        return PartialSum(hidden)


class LayerNormDecoder(Decoder):
    """See `Decoder`."""

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        if shard.is_last:
            self.norm = LayerNorm(spec.hidden_size, spec.rms_norm_eps, bias=spec.norm_bias)

    def embedded(self, ids: Tensor) -> tuple[PartialSum, Tensor | None]:
        """See `Decoder.embedded`."""
        return PartialSum(self.embedding(ids)), None

    def normed(self, x: PartialSum) -> Tensor:
        """See `Decoder.normed`."""
        assert isinstance(self.norm, LayerNorm)
        found: Tensor = self.norm(x.value)
        return found


class Cohere(LayerNormDecoder):
    """See `Decoder`; logits are multiplied by a number."""

    layer_type = CohereLayer

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder.logits`."""
        return super().logits(hidden, out).mul_(self.spec.logit_scale)


class Starcoder2(LayerNormDecoder):
    """See `Decoder`."""

    layer_type = Starcoder2Layer
