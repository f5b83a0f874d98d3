"""Gemma 3n: a token has several residuals, of which layers compute one (AltUp: Baykal et al. 2023), and a vector for each layer.

    p = x + x C(x_a);  h = (p_a + norm(attention(n)) + n + norm(R L n)) / sqrt 2, n = norm(p_a);  y = h + norm(mlp(norm(h)))
    x = p + (y - p_a) c(y);  x_1.. = x_1.. + norm(P (act(G s x_a) * e))

C and c are made of tanh(W norm(.)); e is the token's vector for this layer. The last layers use keys and values of an earlier one of
their kind: they give its projections of a step's tokens to attention beside their own queries, which writes the same lines again.
An MLP's gates are cut at a multiple of their deviation over all columns: tensor-parallel ranks sum what each has of it.
"""

import math
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.protocol.model import AltUpSpec, ModelSpec, PerLayerInputSpec
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.communicator import SINGLE_RANK, Communicator
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, Linear, RMSNorm, parameter
from meshlm.workers.layers.ops import Ops
from meshlm.workers.models import gemma
from meshlm.workers.models.decoder import LayerClasses
from meshlm.workers.partial_sum import PartialSum

LEAST = 1e-5  # of a mean square that is divided by


class Gemma3nLayer(gemma.GemmaLayer):
    def __init__(self, spec: ModelSpec, layer: int, classes: LayerClasses) -> None:
        super().__init__(spec, layer, classes)
        assert spec.altup is not None
        self._altup, self._act = spec.altup, ACTIVATIONS[spec.hidden_act]
        count, hidden, own = spec.altup.altup_num_inputs, spec.hidden_size, spec.altup.hidden_size_per_layer_input
        self.correct_output_scale = parameter(hidden)
        self.correction_coefs = parameter(count, count)
        self.prediction_coefs = parameter(count**2, count)
        self.modality_router = parameter(count, hidden)
        self.laurel_left = Linear(hidden, spec.altup.laurel_rank, bias=False)
        self.laurel_right = Linear(spec.altup.laurel_rank, hidden, bias=False)
        self.per_layer_gate = Linear(hidden, own, bias=False)
        self.per_layer_projection = Linear(own, hidden, bias=False)
        mlp = spec.layers[layer].mlp
        self._cut = NormalDist().inv_cdf(mlp.sparsity) if mlp is not None and mlp.sparsity else None
        self.comm: Communicator = SINGLE_RANK
        self.ranks = 1  # that have some of the MLP's columns each

    def make_norms(self, spec: ModelSpec) -> None:
        super().make_norms(spec)
        self.router_norm, self.laurel_norm, self.per_layer_norm = (
            RMSNorm(spec.hidden_size, spec.rms_norm_eps) for _ in range(3)
        )

    def step(
        self, x: Tensor, own: Tensor, cache: LayerCache, context: ForwardContext, shared: gemma.SharedKV
    ) -> Tensor:
        """x [residuals, t, hidden], own [t, per layer] -> the residuals behind this layer."""
        ops, active = context.ops, self._altup.altup_active_idx
        predicted = self._predicted(x, ops)
        h = self._attended(predicted[active], cache, context, shared)
        y = h + gemma.norm_of(self._mlp(gemma.norm_of(h, self.post_norm, ops), ops), self.mlp_out_norm, ops)
        coefs = F.linear(self._modalities(y, ops), self.correction_coefs) + 1.0
        x = (y - predicted[active]) * coefs.t()[..., None] + predicted
        first = x[active]
        if self._altup.altup_correct_scale:
            first = first * self.correct_output_scale
        first = self.per_layer_projection(self._act(self.per_layer_gate(first, ops)) * own, ops)
        x[1:] += gemma.norm_of(first, self.per_layer_norm, ops)
        return x

    def _attended(self, x: Tensor, cache: LayerCache, context: ForwardContext, shared: gemma.SharedKV) -> Tensor:
        ops, attention = context.ops, self.attention
        assert isinstance(attention, gemma.SharingAttention)
        normed = gemma.norm_of(x, self.input_norm, ops)
        laurel = normed + gemma.norm_of(self.laurel_right(self.laurel_left(normed, ops), ops), self.laurel_norm, ops)
        attended = attention.o.row_parallel(attention.attended(normed, cache, context, shared), None, ops)
        found = gemma.norm_of(ops.finish_sum(attended, x.dtype), self.attention_out_norm, ops)
        out: Tensor = (x + found + laurel) / math.sqrt(2)
        return out

    def _mlp(self, x: Tensor, ops: Ops) -> Tensor:
        """Gates below their mean and `cut` deviations are zero, where the layer is sparse."""
        assert isinstance(self.mlp, MLP)
        gate, up = self.mlp.gate_up(x, ops).chunk(2, dim=-1)
        if self._cut is not None:
            columns = gate.shape[-1] * self.ranks
            mean = self._over_ranks(gate.sum(-1, keepdim=True)) / columns
            deviation = (self._over_ranks((gate - mean).square().sum(-1, keepdim=True)) / columns).sqrt()
            gate = F.relu(gate - mean - deviation * self._cut)
        return ops.finish_sum(self.mlp.down.row_parallel(self._act(gate) * up, None, ops), x.dtype)

    def _over_ranks(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x) if self.ranks > 1 else x

    def _modalities(self, x: Tensor, ops: Ops) -> Tensor:
        """[t, residuals]."""
        routed = F.linear(gemma.norm_of(x, self.router_norm, ops) / x.shape[-1], self.modality_router)
        return routed.float().tanh().to(x.dtype)

    def _predicted(self, x: Tensor, ops: Ops) -> Tensor:
        coefs = F.linear(self._modalities(x[self._altup.altup_active_idx], ops), self.prediction_coefs)
        mixed: Tensor = x.permute(1, 2, 0) @ coefs.unflatten(-1, (len(x), len(x))).transpose(1, 2)
        return mixed.permute(2, 0, 1) + x


class Gemma3n(gemma.Gemma):
    classes = LayerClasses(Gemma3nLayer, gemma.SharingAttention)

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__(spec, max_len, shard)
        assert spec.altup is not None
        assert shard.pp_size == 1
        self._altup: AltUpSpec = spec.altup
        hidden, others = spec.hidden_size, spec.altup.altup_num_inputs - 1
        self.entry = gemma.PerLayerInputs(inputs_of(spec.altup), spec.num_hidden_layers, hidden, spec.rms_norm_eps)
        self.entry.norm.weight = nn.Parameter(self.entry.norm.weight.float(), requires_grad=False)
        self.projections, self.unembed = (
            nn.ModuleList(Linear(hidden, hidden, bias=False) for _ in range(others)) for _ in range(2)
        )

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        super().prepare(device, dtype)
        self.entry.prepare(dtype)
        gemma.share_all(self.layers)

    def join(self, comm: Communicator) -> None:
        super().join(comm)
        for layer in self.layers:
            assert isinstance(layer, Gemma3nLayer)
            layer.comm, layer.ranks = comm, self.shard.tp_size

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        first = batch.with_vectors(self.embedded(batch.known_ids, batch.adapters)[0].value)
        own, size = self.entry(first, batch, self.ops), _size(first)
        x = torch.stack((first, *(_sized(module(first, self.ops), size) for module in self.projections)))
        context, shared = self.context(batch, attention), gemma.SharedKV()
        for nth, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            assert isinstance(layer, Gemma3nLayer)
            x = layer.step(x, own[:, nth], cache, context, shared)
        size = _size(x[0])
        others = (_sized(module(of, self.ops), size) for module, of in zip(self.unembed, x[1:], strict=True))
        return self.normed(PartialSum(torch.stack((x[0], *others)).mean(dim=0)))


def inputs_of(altup: AltUpSpec) -> PerLayerInputSpec:
    return PerLayerInputSpec(
        hidden_size_per_layer_input=altup.hidden_size_per_layer_input,
        vocab_size_per_layer_input=altup.vocab_size_per_layer_input,
    )


def _size(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()


def _sized(x: Tensor, size: Tensor) -> Tensor:
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
