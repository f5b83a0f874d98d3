"""RecurrentGemma's recurrent block, with a real-gated linear recurrent unit (RG-LRU; De et al. 2024, "Griffin", section 2.4).

    x = conv(W_x u);  r = sigmoid(W_a x);  i = sigmoid(W_i x);  log a = -8 softplus(decay) r
    h_t = a h_{t-1} + sqrt(1 - a^2) (i x)          at the first token: h = i x
    W_o (h gelu(W_y u))

W_a and W_i are block-diagonal. It is a selective scan of one number a channel (kernels/selective_scan/reference.py): the step is r, and
the rate log a / r. That scan multiplies what it adds by the step, so the input is divided by it, and gates what it gives, here by one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import Linear
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Attention, LayerClasses
from meshlm.workers.models.gemma import Gemma
from meshlm.workers.models.hybrid import Convolution, HybridLayer, float_parameter

SHARPNESS = 8.0  # of the recurrent gate
UNGATED = 1.2784645427610738  # silu of it is 1
LEAST_STEP = 1e-6  # of what is divided by


class BlockDiagonal(nn.Module):
    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, size, size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(heads, size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, heads size] -> float32 of the same shape."""
        blocks = x.unflatten(1, self.bias.shape).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], blocks, self.weight).transpose(0, 1).flatten(1).float()


class GatedRecurrence(Attention):
    """The module's recurrent block in the place of attention. `qkv` is the product behind the layer's norm."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        state, heads = layer.state, spec.num_attention_heads
        assert state is not None
        self.qkv = Linear(spec.hidden_size, 2 * state.inner, bias=True)
        self.conv = Convolution(state.inner, state.conv_kernel, bias=True)
        self.input_gate, self.recurrent_gate = (BlockDiagonal(heads, state.inner // heads) for _ in range(2))
        self.decay = float_parameter(state.inner)
        self.o = Linear(state.inner, spec.hidden_size, bias=True)
        self._act = ACTIVATIONS[spec.hidden_act]
        self._rate = self._none = torch.empty(0)

    def prepare(self, ops: Ops) -> None:
        self._rate = (-SHARPNESS * F.softplus(self.decay))[:, None]
        self._none = torch.zeros_like(self.decay)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        own = cache.state
        assert own is not None
        states = context.attention.states(own.group)
        gate, inputs = qkv.chunk(2, dim=1)
        x = states.conv(inputs, self.conv.weight[:, 0], self.conv.bias, own, silu=False)
        step = torch.sigmoid(self.recurrent_gate(x)).clamp(min=LEAST_STEP)
        kept = torch.exp(2 * step * self._rate[:, 0])
        first = (context.batch.positions == 0)[:, None]
        added = torch.sigmoid(self.input_gate(x)) * x.float() * torch.where(first, 1.0, torch.sqrt(1 - kept))
        ungated = torch.full_like(x, UNGATED)
        one = x.new_ones(len(x), 1)
        before_softplus = torch.log(torch.expm1(step))
        scanned = (added / step).to(x.dtype)
        found = states.selective_scan(
            scanned, before_softplus.to(x.dtype), self._rate, one, one, self._none, ungated, own
        )
        return found * self._act(gate)


class RecurrentGemma(Gemma):
    """Layers of both kinds; embeddings are scaled by the root of their size in bfloat16, whatever the model's type is."""

    classes = LayerClasses(HybridLayer, state=GatedRecurrence)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        super().prepare(device, dtype)
        self._embedding_scale = float(torch.tensor(self.spec.hidden_size**0.5, dtype=torch.bfloat16))
