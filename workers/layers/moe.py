"""A mixture of experts in the place of a layer's MLP: norm, router, experts, and those that every token goes to.

    y = norm(x);  out = sum over the chosen e of w_e expert_e(y)  [+ sigmoid(y g) shared(y)]    (Shazeer et al. 2017; DeepSeekMoE 2024)

How tokens get to experts and back is workers/moe/'s affair: the layer has the weights and asks for a pair of parts, once.
"""

import torch
from torch import Tensor, nn

from meshlm.kernels.moe_routing.reference import Rule
from meshlm.kernels.silu_mul.reference import sigmoid
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import StepInputs
from meshlm.workers.formats.format import UNQUANTIZED, WeightedLayer
from meshlm.workers.layers.elements import MLP, Linear, RMSNorm
from meshlm.workers.layers.ops import Ops, RouterWeights
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.fused_moe import Dispatcher, ExpertExtras, ExpertWeights, FusedMoE, Routing
from meshlm.workers.moe.placement.slots import Replicas
from meshlm.workers.moe.registry import make_experts
from meshlm.workers.partial_sum import Kind, PartialSum

ROUTING = (torch.int32, torch.float32)  # dtypes of experts and weights


class Router(nn.Module):
    def __init__(self, hidden: int, moe: MoESpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False) if moe.router_bias else None
        self.correction_bias: nn.Parameter | None = None
        if moe.correction_bias:
            self.correction_bias = nn.Parameter(torch.zeros(moe.num_experts, dtype=torch.float32), requires_grad=False)
        self._num_experts, self.rule = moe.num_experts, rule_of(moe)

    def prepare(self, ops: Ops) -> None:
        self.weight = nn.Parameter(ops.pack(self.weight), requires_grad=False)

    def after_norm(
        self, x: PartialSum, norm: RMSNorm, slots: Tensor | None, ops: Ops
    ) -> tuple[Tensor, Tensor, Routing]:
        """The norm of x, the residual with x in it, and the experts of each token: see `Ops.norm_route`."""
        weights = RouterWeights(self.weight, self.bias, self.correction_bias, self.rule, self._num_experts)
        y, residual, *chosen = ops.norm_route(x, (norm.weight, norm.eps), weights, slots)
        return y, residual, Routing(*chosen)


def rule_of(moe: MoESpec) -> Rule:
    return Rule(
        moe.num_experts_per_tok, moe.scoring_func == "sigmoid", moe.norm_topk_prob, moe.routed_scaling_factor,
        moe.n_group, moe.topk_group, moe.group_score == "top2",
    )  # fmt: skip


class GroupedLinear(WeightedLayer):
    """The same product of each expert of this rank."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, UNQUANTIZED, bias=bias, stack=(experts,))


class ExpertLinears(nn.Module):
    """The weights of this rank's experts, or of its part of all experts."""

    def __init__(self, hidden: int, moe: MoESpec) -> None:
        super().__init__()
        begin, end = moe.local_experts or (0, moe.num_experts)
        slots = end - begin + moe.redundant_experts
        wide, bias = moe.moe_intermediate_size, moe.expert_bias
        self.gate_up = GroupedLinear(slots, hidden, (2 if moe.gated else 1) * wide, bias=bias)
        self.down = GroupedLinear(slots, wide, hidden, bias=bias)
        self._swiglu, self._gated = moe.swiglu, moe.gated

    def linears(self) -> tuple[GroupedLinear, GroupedLinear]:
        return self.gate_up, self.down

    def weights(self, act: str) -> ExpertWeights:
        extras = None
        if self.gate_up.bias is not None or self._swiglu is not None:
            extras = ExpertExtras(self.gate_up.bias, self.down.bias, self._swiglu)
        return ExpertWeights(self.gate_up.grouped(), self.down.grouped(), act, extras, self._gated)


class MoE(nn.Module):
    shared_kind: type[MLP] = MLP

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe, self.act, self._hidden = spec.moe, spec.hidden_act, spec.hidden_size
        self.router = Router(spec.hidden_size, spec.moe)
        self.experts = ExpertLinears(spec.hidden_size, spec.moe)
        wide = spec.moe.shared_intermediate_size
        self.shared = self.shared_kind(spec, wide) if wide else None
        self.shared_gate = Linear(spec.hidden_size, 1, bias=False) if spec.moe.shared_gate else None
        self._fused: FusedMoE | None = None
        self.replicas: Replicas | None = None  # where experts move between ranks

    def use(self, dispatcher: Dispatcher, *, deterministic: bool = False) -> None:
        """Sets, after loading, how tokens get to the experts. ProcessFatal where no experts fit it."""
        self._fused = FusedMoE(dispatcher, make_experts(self.experts.weights(self.act), deterministic=deterministic))

    @property
    def fused(self) -> FusedMoE:
        """The object that interleaves its steps with those of another micro-batch."""
        assert self._fused is not None
        return self._fused

    def of_step(self, tokens: int, ops: Ops) -> FusedMoE:
        """The object that computes a step of so many tokens: with what adapters of its rows change of these experts."""
        changes = None if ops.adapters is None else ops.adapters.of_experts(self.experts, tokens, ops)
        if changes is None:
            return self.fused
        experts = self.fused.experts
        assert isinstance(experts, ReferenceExperts), "adapters of experts are refused where kernels compute them"
        return FusedMoE(self.fused.dispatcher, experts.changed(changes))

    def idle_parameters(self) -> int:
        """The number of the experts' parameters, as they are stored, without those that a token needs."""
        stored = sum(parameter.numel() for parameter in self.experts.parameters())
        biases = [linear.bias.numel() for linear in self.experts.linears() if linear.bias is not None]
        numbers = sum(linear.num_weights() for linear in self.experts.linears()) + sum(biases)
        return stored - numbers * self.moe.num_experts_per_tok // self.moe.num_experts

    def forward(self, x: PartialSum, norm: RMSNorm, batch: StepInputs, ops: Ops) -> PartialSum:
        """Computes what the experts add to the residual, which has x in it then."""
        y, residual, routing = self.router.after_norm(x, norm, batch.slot_mapping[0], ops)
        if self.replicas is not None:
            routing = self.replicas.of(routing, ops)
        into = y
        if self.moe.weights_on_input:
            into = y * routing.weights.to(y.dtype)
            routing = routing._replace(weights=(routing.experts >= 0).to(routing.weights.dtype))
        found, beside = self.of_step(len(into), ops).forward(
            into, routing, self.shared and (lambda: self.of_shared(y, ops))
        )
        return (found if beside is None else _added(found, beside, y.dtype, ops))._replace(residual=residual)

    def idle(self) -> None:
        """A step in which this rank has no tokens, and its experts may have those of others."""
        down = self.experts.down
        x = torch.empty(0, self._hidden, dtype=down.dtype, device=down.weight.device)
        routing = Routing(*(torch.empty(0, self.moe.num_experts_per_tok, dtype=t, device=x.device) for t in ROUTING))
        self.fused.forward(x, routing)

    def of_shared(self, y: Tensor, ops: Ops) -> PartialSum:
        """The output of the shared experts, to which every token goes."""
        assert self.shared is not None
        found = self.shared.of_normed(y, ops)
        if self.shared_gate is None:
            return found
        return found._replace(value=found.value * sigmoid(self.shared_gate(y, ops)))


def _added(a: PartialSum, b: PartialSum, dtype: torch.dtype, ops: Ops) -> PartialSum:
    """The sum of two sums, neither of which has a residual."""
    if a.kind is b.kind and a.kind in (Kind.WHOLE, Kind.RANK):
        return PartialSum(a.value + b.value, a.kind)
    return PartialSum(ops.finish_sum(a, dtype) + ops.finish_sum(b, dtype))
