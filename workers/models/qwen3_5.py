"""Qwen3.5 (Qwen 2026): as Qwen3-Next, with the rows of a mixer's products by kind: q, k, v, z, b, a."""

import torch
from torch import Tensor

from meshlm.workers.models.decoder import LayerClasses
from meshlm.workers.models.hybrid import Hybrid, HybridLayer
from meshlm.workers.models.qwen3_next import GatedAttention, GatedDeltaNet


class FlatGatedDeltaNet(GatedDeltaNet):
    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = self._state
        inputs, z, b, a = torch.split(qkv, [state.conv_dim, state.inner, state.num_heads, state.num_heads], dim=1)
        return inputs, z, b, a


class Qwen3_5(Hybrid):
    classes = LayerClasses(HybridLayer, GatedAttention, FlatGatedDeltaNet)
