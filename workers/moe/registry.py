"""Which experts there are, and which a layer gets: the first of its format that this device, dtype and method of weights can have."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import structlog
import torch

from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import QuantizationScheme
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.moe.dispatch.all_gather import AllGather
from meshlm.workers.moe.dispatch.all_to_all import AllToAll
from meshlm.workers.moe.dispatch.batches import InBatches
from meshlm.workers.moe.dispatch.collective import Collective
from meshlm.workers.moe.dispatch.members import Members
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.reference import ReferenceBatchedExperts, ReferenceExperts
from meshlm.workers.moe.parts import (
    UNGATED_ACT,
    ActivationFormat,
    Dispatcher,
    Experts,
    ExpertWeights,
    WeightAndReduce,
)
from meshlm.workers.partial_sum import Kind

_log = structlog.get_logger()
ACTS = "silu", "gelu_pytorch_tanh"  # of gates, that kernels compute (experts/epilogues.py)


class ExpertsKind(NamedTuple):
    """One implementation."""

    format: ActivationFormat
    unsupported: Callable[[ExpertWeights], str | None]  # why it cannot compute these; None: it can
    make: Callable[[ExpertWeights], Experts]


def _anywhere(weights: ExpertWeights) -> str | None:
    return None


def _unsupported_by_mxfp4(weights: ExpertWeights) -> str | None:
    if weights.packed is None:
        return "it computes with MXFP4 weights"
    if not weights.gate_up.is_cuda or weights.packed.dtype not in (torch.float16, torch.bfloat16):
        return "it computes in float16 and bfloat16 on GPUs"
    return _other_activation(weights) if weights.gated else "it computes experts with a gate"


def _other_activation(weights: ExpertWeights) -> str | None:
    if not weights.gated:
        plain = weights.act == UNGATED_ACT and weights.extras is None
        return None if plain else f"without a gate it computes {UNGATED_ACT} without biases"
    if weights.act not in ACTS and (weights.extras is None or weights.extras.swiglu is None):
        return f"it computes {' and '.join(ACTS)}, not {weights.act}"
    return None


def _unsupported_by_triton(weights: ExpertWeights) -> str | None:
    if weights.packed is not None:
        return "it computes with weights of 16 and 8 bits"
    gate_up, scales = weights.gate_up, weights.scales
    dtype = gate_up.dtype if scales is None else scales.dtype
    if not gate_up.is_cuda or dtype not in (torch.float16, torch.bfloat16):
        return "it computes in float16 and bfloat16 on GPUs"
    capability = torch.cuda.get_device_capability(gate_up.device)
    if capability < ((8, 0) if scales is None else (8, 9)):
        return f"it needs compute capability {'8.0' if scales is None else '8.9'}"
    if scales is not None and (why := unsupported_scheme(scales.scheme, (gate_up.shape[2], weights.down.shape[2]))):
        return why
    if why := _other_activation(weights):
        return why
    if gate_up.shape[2] % 8 or weights.down.shape[2] % 8:
        return "it computes experts whose sizes are multiples of 8"
    if (weights.extras is not None and scales is None) or weights.act != "silu":
        from meshlm.workers.moe.experts.self_test import of_extras

        act = "silu" if weights.extras is not None and weights.extras.swiglu is not None else weights.act
        return of_extras(dtype, gate_up.device, act) or None
    return None


def unsupported_scheme(scheme: QuantizationScheme, inputs: tuple[int, int]) -> str | None:
    """Why its kernels do not take weights of this scheme, of gate and down with so many inputs; None: they do."""
    if any(each % 16 for each in inputs):
        return "it computes 8-bit experts whose sizes are multiples of 16"
    several = scheme.weight == "block"
    if several and scheme.block[1] not in (64, 128):
        return f"it has no tiles of {scheme.block[1]} inputs, which have a scale together"
    if scheme.activation == "group" and (not several or scheme.group != scheme.block[1]):
        return "it takes groups of inputs that have the same size for activations and weights"
    return None


def _mxfp4(given: ExpertWeights) -> Experts:
    from meshlm.workers.moe.experts.mxfp4 import MXFP4Experts
    from meshlm.workers.moe.experts.self_test import may_be_direct

    assert given.packed is not None
    return MXFP4Experts(given.packed, given.extras, given.act, direct=may_be_direct(given.packed))


def _mxfp4_batched(given: ExpertWeights) -> Experts:
    from meshlm.workers.moe.experts.mxfp4 import MXFP4BatchedExperts

    assert given.packed is not None
    return MXFP4BatchedExperts(given.packed, given.extras, given.act)


def _triton(given: ExpertWeights) -> Experts:
    from meshlm.workers.moe.experts.triton import TritonExperts

    return TritonExperts(given)


def _triton_batched(given: ExpertWeights) -> Experts:
    from meshlm.workers.moe.experts.triton import TritonBatchedExperts

    return TritonBatchedExperts(given)


EXPERTS: dict[str, ExpertsKind] = {
    "triton": ExpertsKind(ActivationFormat.CONTIGUOUS, _unsupported_by_triton, _triton),
    "triton, batched": ExpertsKind(ActivationFormat.BATCHED, _unsupported_by_triton, _triton_batched),
    "mxfp4": ExpertsKind(ActivationFormat.CONTIGUOUS, _unsupported_by_mxfp4, _mxfp4),
    "mxfp4, batched": ExpertsKind(ActivationFormat.BATCHED, _unsupported_by_mxfp4, _mxfp4_batched),
    "reference": ExpertsKind(ActivationFormat.CONTIGUOUS, _anywhere, lambda given: ReferenceExperts(*given)),
    "reference, batched": ExpertsKind(
        ActivationFormat.BATCHED, _anywhere, lambda given: ReferenceBatchedExperts(*given)
    ),
}
"""By name, the fastest first."""


GROUP_DISPATCHERS: dict[str, Callable[[Members], Dispatcher]] = {
    "allgather_reducescatter": lambda members: Collective(members, AllGather()),
    "all_to_all": lambda members: Collective(members, AllToAll()),
    "allgather_reducescatter, batched": lambda members: InBatches(
        Collective(members, AllGather()), members.num_experts
    ),
    "all_to_all, batched": lambda members: InBatches(Collective(members, AllToAll()), members.num_experts),
}
"""Between data-parallel ranks, by the name of their --all2all-backend."""


@cache
def _warn(name: str, reasons: str) -> None:
    """Once, not for every layer."""
    _log.warning("experts are computed in plain torch, which waits for the GPU", experts=name, reason=reasons)


def make_experts(format: ActivationFormat, weights: ExpertWeights) -> Experts:
    """The fastest for activations of this format. ProcessFatal says why there are none."""
    reasons: list[str] = []
    for name, kind in EXPERTS.items():
        if kind.format is format:
            why = kind.unsupported(weights)
            if why is None:
                if name.startswith("reference") and weights.gate_up.is_cuda:
                    _warn(name, "; ".join(reasons))
                return kind.make(weights)
            reasons.append(f"{name}: {why}")
    raise ProcessFatal(f"no experts for {format.value} activations: {'; '.join(reasons) or 'there are none'}")


def group_dispatch(moe: MoESpec, shard: Shard, group: ExpertGroup, backend: str, *, slots: bool = False) -> Dispatcher:
    """Between data-parallel ranks, each of whose workers has some of the experts. backend: --all2all-backend.

    slots: a routing has numbers of the members' slots (`Replicas`), not of experts.
    """
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


def no_dispatch(moe: MoESpec, num_ranks: int, *, slots_of: int | None = None) -> Dispatcher:
    """The dispatch of a model whose tensor-parallel ranks all have all tokens of a step.

    slots_of: a routing has numbers of the ranks' slots (`Replicas`), and this rank is the one with this number.
    """
    begin, end = moe.local_experts or (0, moe.num_experts)
    if slots_of is not None:
        each = end - begin + moe.redundant_experts
        return NoDispatch(slots_of * each, each, num_ranks * each, Kind.RANK)
    if num_ranks > 1:
        return NoDispatch(begin, end - begin, moe.num_experts, Kind.RANK)
    return NoDispatch(begin, end - begin, moe.num_experts, finishes=frozenset(WeightAndReduce))
