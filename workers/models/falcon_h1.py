"""Falcon-H1: attention and a Mamba-2 mixer read the same norm. One product makes the inputs of both, one takes the outputs of both."""

import torch
from torch import Tensor

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models.decoder import Attention, LayerClasses
from meshlm.workers.models.hybrid import Hybrid, HybridLayer
from meshlm.workers.models.mamba2 import Mamba2Mixer


class ParallelMixer(Mamba2Mixer):
    """Rows of `qkv`: queries, keys, values, and what the mixer takes. Columns of `o`: heads of attention, and those of the mixer."""

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        Attention.make(self, spec, layer)
        super().make(spec, layer)
        heads = spec.num_attention_heads * self.head_dim
        self._attends = heads + 2 * self.kv_heads * self.head_dim
        self.qkv = Linear(spec.hidden_size, self._attends + sum(self._sizes), bias=False)
        self.o = Linear(heads + self._state.inner, spec.hidden_size, bias=False)

    def prepare(self, ops: Ops) -> None:
        Attention.prepare(self, ops)
        super().prepare(ops)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        heads = qkv[:, : self._attends].contiguous()
        found = Attention.attend(self, heads, cache, context)
        return torch.cat((found, super().attend(qkv[:, self._attends :], cache, context)), dim=1)


class FalconH1(Hybrid):
    classes = LayerClasses(HybridLayer, state=ParallelMixer)
