"""Gemma 4, for text. Layers that see all have heads of their own size and number; their values may be their keys.

    h = x + norm(attention(norm(x)))
    y = h + norm(mlp(norm(h)))                                       a dense layer
    y = h + norm(norm(mlp(norm(h))) + norm(experts(norm(h))))        with experts, chosen by router(norm(h)) and scaled each
    x = (y + norm(P (act(G y) * e))) * scalar                        e: the token's vector for this layer, where there is one

Attention and sharing of keys and values: gemma.py.
"""

import torch
from torch import Tensor, nn

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, Linear, RMSNorm
from meshlm.workers.layers.moe import MoE
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models import gemma
from meshlm.workers.models.decoder import LayerClasses
from meshlm.workers.partial_sum import PartialSum


class ScaledExperts(MoE):
    """Experts whose router has a norm of its own, and a scale for each of them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert spec.moe is not None
        self.router_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)  # its weight has 1 / sqrt(hidden) in it
        self.per_expert_scale = nn.Parameter(torch.ones(spec.moe.num_experts), requires_grad=False)

    def of(self, x: Tensor, norm: RMSNorm, batch: StepInputs, ops: Ops) -> Tensor:
        """x [t, hidden], which the router norms itself, and `norm` for the experts -> [t, hidden]."""
        _, _, routing = self.router.after_norm(PartialSum(x), self.router_norm, batch.slot_mapping[0], ops)
        # padding has -1, and kernels that are only compiled leave anything
        known = routing.experts.clamp(0, self.moe.num_experts - 1)
        scales = self.per_expert_scale.float()[known.long()]
        routing = routing._replace(weights=routing.weights * scales)
        if self.replicas is not None:
            routing = self.replicas.of(routing, ops)
        found, _ = self.of_step(len(x), ops).forward(ops.rms_norm(x, norm.weight, norm.eps), routing)
        return ops.finish_sum(found, x.dtype)


class Gemma4Layer(gemma.GemmaLayer):
    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        super().__init__(spec, layer, classes)
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        self.moe: ScaledExperts | None = None
        if spec.layers[layer].experts is not None:
            self.moe = ScaledExperts(spec)
            self.moe_norm, self.mlp_own_norm, self.moe_out_norm = (RMSNorm(hidden, eps) for _ in range(3))
        self._takes_input = spec.per_layer_input is not None
        if spec.per_layer_input is not None:
            own = spec.per_layer_input.hidden_size_per_layer_input
            self._act = ACTIVATIONS[spec.hidden_act]
            self.per_layer_gate = Linear(hidden, own, bias=False)
            self.per_layer_projection = Linear(own, hidden, bias=False)
            self.per_layer_norm = RMSNorm(hidden, eps)

    def step(
        self, x: Tensor, own: Tensor | None, cache: LayerCache, context: ForwardContext, shared: gemma.SharedKV
    ) -> Tensor:
        """x [t, hidden], own [t, per layer] -> [t, hidden]."""
        ops, attention, mlp = context.ops, self.attention, self.mlp
        assert isinstance(attention, gemma.SharingAttention)
        assert isinstance(mlp, MLP)
        out = attention.attended(gemma.norm_of(x, self.input_norm, ops), cache, context, shared)
        found = ops.finish_sum(attention.o.row_parallel(out, None, ops), x.dtype)
        h = x + gemma.norm_of(found, self.attention_out_norm, ops)
        found = ops.finish_sum(mlp.of_normed(gemma.norm_of(h, self.post_norm, ops), ops), x.dtype)
        if self.moe is not None:
            found = gemma.norm_of(found, self.mlp_own_norm, ops)
            found = found + gemma.norm_of(self.moe.of(h, self.moe_norm, context.batch, ops), self.moe_out_norm, ops)
        y = h + gemma.norm_of(found, self.mlp_out_norm, ops)
        if own is not None:
            gated = self._act(self.per_layer_gate(y, ops)) * own
            y = y + gemma.norm_of(self.per_layer_projection(gated, ops), self.per_layer_norm, ops)
        scaled: Tensor = y * self.scalar
        return scaled


class Gemma4(gemma.Gemma):
    classes = LayerClasses(Gemma4Layer, gemma.SharingAttention)

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        self.entry: gemma.PerLayerInputs | None = None
        if spec.per_layer_input is not None:
            assert shard.pp_size == 1
            self.entry = gemma.PerLayerInputs(
                spec.per_layer_input, spec.num_hidden_layers, spec.hidden_size, spec.rms_norm_eps
            )
            self.entry.norm.weight = nn.Parameter(self.entry.norm.weight.float(), requires_grad=False)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        super().prepare(device, dtype)
        if self.entry is not None:
            self.entry.prepare(dtype)
        gemma.share_all(self.layers)

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        if self.shard.is_first:
            x = batch.with_vectors(self.embedded(batch.known_ids, batch.adapters)[0].value)
        else:
            assert residual is not None
            x = residual
        own = None if self.entry is None else self.entry(x, batch, self.ops)
        context, shared = self.context(batch, attention), gemma.SharedKV()
        for nth, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            assert isinstance(layer, Gemma4Layer)
            x = layer.step(x, None if own is None else own[:, nth], cache, context, shared)
        return self.normed(PartialSum(x)) if self.norm is not None else x
