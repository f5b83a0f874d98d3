"""Qwen3.5 (Qwen 2026): as Qwen3-Next, with the rows of a mixer's products by kind: q, k, v, z, b, a."""

import torch
from torch import Tensor

from meshlm.workers.models.hybrid import Hybrid
from meshlm.workers.models.qwen3_next import GatedDeltaNet, Qwen3NextLayer


class FlatGatedDeltaNet(GatedDeltaNet):
    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = self._state
        inputs, z, b, a = torch.split(qkv, [state.conv_dim, state.inner, state.num_heads, state.num_heads], dim=1)
        return inputs, z, b, a


class Qwen3_5Layer(Qwen3NextLayer):
    """The gated delta net or gated attention, and an MLP or experts."""

    state_kind = FlatGatedDeltaNet


class Qwen3_5(Hybrid):
    layer_type = Qwen3_5Layer
