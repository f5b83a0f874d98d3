"""LFM2's short convolution in the place of attention: B, C, x = W_in u;   W_out (C * conv(B * x)), without an activation."""

from torch import Tensor

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Attention, LayerClasses
from meshlm.workers.models.hybrid import Hybrid, HybridLayer
from meshlm.workers.models.mamba2 import Convolution


class ShortConvolution(Attention):
    """See the module docstring. `qkv` is the product behind the layer's norm."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        state = layer.state
        assert state is not None
        self.qkv = Linear(spec.hidden_size, 3 * state.inner, bias=state.proj_bias)
        self.conv = Convolution(state.inner, state.conv_kernel, bias=state.conv_bias)
        self.o = Linear(state.inner, spec.hidden_size, bias=state.proj_bias)

    def prepare(self, ops: Ops) -> None:
        """See `Attention.prepare`: there is nothing."""

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        own = cache.state
        assert own is not None
        before, behind, x = qkv.chunk(3, dim=1)
        states = context.attention.states(own.group)
        return behind * states.conv(before * x, self.conv.weight[:, 0], self.conv.bias, own, silu=False)


class Lfm2(Hybrid):
    classes = LayerClasses(HybridLayer, state=ShortConvolution)
