"""Decoders of which layers attend, keep a recurrent state, or do neither, and have an MLP, experts, or none of them.

A mixer with a state stands in the place of attention (mamba2.py), so a layer, its norms and its sums are `decoder.py`'s.
"""

from torch import Tensor, nn

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.mlp import MLP
from meshlm.workers.layers.moe import MoE
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer, LayerClasses
from meshlm.workers.models.layer_norm import UngatedMLP
from meshlm.workers.models.mamba2 import Mamba2Mixer
from meshlm.workers.partial_sum import PartialSum


class NoMixer(Attention):
    """A layer that is an MLP alone."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        """See `Attention.make`: there is nothing."""

    def prepare(self, ops: Ops) -> None:
        """See `Attention.prepare`: there is nothing."""

    def forward(
        self, x: PartialSum, norm: RMSNorm, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """See `Attention.forward`: x, as it came."""
        return x


class NoMLP(MLP):
    """A layer that is a mixer alone."""

    def __init__(self, spec: ModelSpec) -> None:
        nn.Module.__init__(self)

    def forward(self, x: PartialSum, norm: RMSNorm, batch: StepInputs, ops: Ops) -> PartialSum:
        """See `MLP.forward`: x, as it came."""
        return x


class HybridLayer(DecoderLayer):
    """What the spec says of this layer."""

    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        nn.Module.__init__(self)
        record = spec.layers[layer]
        kind = classes.state if record.state else classes.attention if record.attention else NoMixer
        self.attention = kind(spec, layer)
        if kind is not NoMixer:
            self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp: MLP | MoE
        if record.mlp is not None:
            self.mlp = classes.mlp(spec, record.mlp.intermediate_size)
        else:
            self.mlp = classes.experts(spec) if record.experts is not None else NoMLP(spec)
        if not isinstance(self.mlp, NoMLP):
            self.post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        if not isinstance(self.attention, NoMixer):
            x = self.attention(x, self.input_norm, cache, context, normed)
        if isinstance(self.mlp, NoMLP):
            return x
        found: PartialSum = self.mlp(x, self.post_norm, context.batch, context.ops)
        return found


class Hybrid(Decoder):
    classes = LayerClasses(HybridLayer, state=Mamba2Mixer)

    def embedded(self, ids: Tensor) -> tuple[PartialSum, Tensor | None]:
        """See `Decoder.embedded`; a first layer without a mixer has no norm before one."""
        first = self.layers[0]
        if isinstance(first, DecoderLayer) and isinstance(first.attention, NoMixer):
            return PartialSum(self.embedding(ids)), None
        return super().embedded(ids)


class SquaredReLU(UngatedMLP):
    """down(relu(up(norm(x)))^2)."""

    def forward(self, x: PartialSum, norm: RMSNorm, batch: StepInputs, ops: Ops) -> PartialSum:
        hidden, residual = self.up.after_norm(x, norm, ops)
        return self.down.row_parallel(ACTIVATIONS[self._act](hidden), residual, ops)


class SquaredReLUExperts(MoE):
    """Experts without gates."""

    shared_kind = SquaredReLU


class NemotronH(Hybrid):
    classes = LayerClasses(HybridLayer, state=Mamba2Mixer, mlp=SquaredReLU, experts=SquaredReLUExperts)
