"""Which experts there are, and which a layer gets: the first that this device, dtype and method of weights can have."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.kernels.packed_experts.layout import ExpertWeight
from meshlm.kernels.quantise_int8.reference import Int8Weight
from meshlm.protocol.layers import MoESpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.moe import fused_moe
from meshlm.workers.moe.dispatch.collective import AllGather, AllToAll, Collective, Members
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.partial_sum import Kind

_log = structlog.get_logger()
ACTS = "silu", "gelu_pytorch_tanh"  # of gates, that kernels compute (experts/triton.py)


class ExpertsKind(NamedTuple):
    unsupported: Callable[[fused_moe.ExpertWeights], str | None]  # why it cannot compute these; None: it can
    make: Callable[[fused_moe.ExpertWeights], fused_moe.Experts]


def _anywhere(weights: fused_moe.ExpertWeights) -> str | None:
    return None


def _unsupported_by_packed(weights: fused_moe.ExpertWeights) -> str | None:
    if not isinstance(weights.down.kernel, ExpertWeight) or not isinstance(weights.gate_up.kernel, ExpertWeight):
        return "it computes with packed weights"
    if weights.down.device.type != "cuda" or weights.down.dtype not in (torch.float16, torch.bfloat16):
        return "it computes in float16 and bfloat16 on GPUs"
    return _other_activation(weights) if weights.gated else "it computes experts with a gate"


def computes_gate(moe: MoESpec, act: str) -> bool:
    """Whether kernels compute what stands between the products of such experts with a gate."""
    return moe.gated and (act in ACTS or moe.swiglu is not None)


def _other_activation(weights: fused_moe.ExpertWeights) -> str | None:
    if not weights.gated:
        plain = weights.act == fused_moe.UNGATED_ACT and weights.extras is None
        return None if plain else f"without a gate it computes {fused_moe.UNGATED_ACT} without biases"
    if weights.act not in ACTS and (weights.extras is None or weights.extras.swiglu is None):
        return f"it computes {' and '.join(ACTS)}, not {weights.act}"
    return None


def _unsupported_by_triton(weights: fused_moe.ExpertWeights) -> str | None:
    down, dtype, device = weights.down.kernel, weights.down.dtype, weights.down.device
    if not isinstance(down, Tensor | Fp8Weight | Int8Weight) or type(down) is not type(weights.gate_up.kernel):
        return "it computes with weights of 16 and 8 bits"
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "it computes in float16 and bfloat16 on GPUs"
    floats, eight_bits = isinstance(down, Fp8Weight), not isinstance(down, Tensor)
    if torch.cuda.get_device_capability(device) < ((8, 9) if floats else (8, 0)):
        return f"it needs compute capability {'8.9' if floats else '8.0'}"
    inputs = (weights.gate_up.shape[2], weights.down.shape[2])
    group, rounded = (down.group, down.rounded) if isinstance(down, Fp8Weight) else (0, 0)
    if eight_bits and (why := unsupported_groups(group, rounded, inputs)):
        return why
    if why := _other_activation(weights):
        return why
    if any(each % 8 for each in inputs):
        return "it computes experts whose sizes are multiples of 8"
    if (weights.extras is not None and not eight_bits) or weights.act != "silu":
        from meshlm.workers.moe.experts.self_test import of_extras

        act = "silu" if weights.extras is not None and weights.extras.swiglu is not None else weights.act
        return of_extras(dtype, device, act) or None
    return None


def unsupported_groups(group: int, rounded: int | None, inputs: tuple[int, int]) -> str | None:
    """Why its kernels do not take weights of 8 bits (as `Fp8Weight` has them) of gate and down with so many inputs; None: they do."""
    if any(each % 16 for each in inputs):
        return "it computes 8-bit experts whose sizes are multiples of 16"
    if group not in (0, 64, 128):
        return f"it has no tiles of {group} inputs, which have a scale together"
    if rounded and rounded != group:
        return "it takes groups of inputs that have the same size for activations and weights"
    return None


def _packed(given: fused_moe.ExpertWeights) -> fused_moe.Experts:
    from meshlm.workers.moe.experts.packed import PackedExperts
    from meshlm.workers.moe.experts.self_test import may_be_direct

    return PackedExperts(given, direct=may_be_direct(given))


def _triton(given: fused_moe.ExpertWeights) -> fused_moe.Experts:
    from meshlm.workers.moe.experts.triton import TritonExperts

    return TritonExperts(given)


def _invariant(given: fused_moe.ExpertWeights) -> fused_moe.Experts:
    """A row's numbers do not depend on others (--deterministic). ProcessFatal where no kernel computes such experts."""
    from meshlm.kernels.grouped_gemm.plan import INVARIANT
    from meshlm.workers.moe.experts.triton import TritonExperts

    if why := _unsupported_by_triton(given):
        raise ProcessFatal(f"--deterministic: not proven for these experts: {why}; leave it out")
    return TritonExperts(given, INVARIANT)


EXPERTS: dict[str, ExpertsKind] = {
    "triton": ExpertsKind(_unsupported_by_triton, _triton),
    "packed": ExpertsKind(_unsupported_by_packed, _packed),
    "reference": ExpertsKind(_anywhere, ReferenceExperts),
}
"""By name, the fastest first."""
GROUP_DISPATCHERS: dict[str, Callable[[Members], fused_moe.Dispatcher]] = {
    "allgather_reducescatter": lambda members: Collective(members, AllGather()),
    "all_to_all": lambda members: Collective(members, AllToAll()),
}
"""Between data-parallel ranks, by the name of their --all2all-backend."""


@cache
def _warn(name: str, reasons: str) -> None:
    """Once, not for every layer."""
    _log.warning("experts are computed in plain torch, which waits for the GPU", experts=name, reason=reasons)


def make_experts(weights: fused_moe.ExpertWeights, *, deterministic: bool = False) -> fused_moe.Experts:
    """The fastest that can compute these weights; plain torch can all. deterministic: --deterministic, as all are on a CPU."""
    if deterministic and weights.gate_up.device.type == "cuda":
        return _invariant(weights)
    reasons: list[str] = []
    for name, kind in EXPERTS.items():
        if (why := kind.unsupported(weights)) is None:
            if name == "reference" and weights.gate_up.device.type == "cuda":
                _warn(name, "; ".join(reasons))
            return kind.make(weights)
        reasons.append(f"{name}: {why}")
    raise AssertionError("plain torch computes whatever there is")


def group_dispatch(
    moe: MoESpec, shard: Shard, group: ExpertGroup, backend: str, *, slots: bool = False
) -> fused_moe.Dispatcher:
    """Between data-parallel ranks, each of whose workers has some of the experts. backend: --all2all-backend. slots: a routing has
    numbers of the members' slots (`Replicas`), not of experts."""
    begin, end = shard.experts(moe.num_experts)
    count = end - begin
    firsts = tuple((member * shard.tp_size + shard.tp_rank) * count for member in range(group.size))
    if slots:
        count += moe.redundant_experts
        firsts = tuple(member * count for member in range(group.size))
    kind = Kind.RANK if shard.tp_size > 1 else Kind.WHOLE
    members = Members(group, firsts, count, kind)
    if backend != "peer_memory":
        return GROUP_DISPATCHERS[backend](members)
    from meshlm.workers.moe.dispatch.peer_memory import PeerMemory

    assert group.rooms is not None
    return PeerMemory(members, group.rooms)


def no_dispatch(moe: MoESpec, num_ranks: int, *, slots_of: int | None = None) -> fused_moe.Dispatcher:
    """The dispatch of a model whose tensor-parallel ranks all have all tokens of a step. slots_of: a routing has numbers of the
    ranks' slots (`Replicas`), and this rank is the one with this number."""
    begin, end = moe.local_experts or (0, moe.num_experts)
    if slots_of is not None:
        each = end - begin + moe.redundant_experts
        return NoDispatch(slots_of * each, each, num_ranks * each, Kind.RANK)
    if num_ranks > 1:
        return NoDispatch(begin, end - begin, moe.num_experts, Kind.RANK)
    return NoDispatch(begin, end - begin, moe.num_experts, finishes=frozenset(fused_moe.WeightAndReduce))
