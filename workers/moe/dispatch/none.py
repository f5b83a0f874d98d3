"""No dispatch: every rank that has experts of a layer has all tokens of the step, one rank alone or those of a tensor-parallel group.

Of a group each rank has a part of every expert, or all of some experts: either way its results are a term of the sum over the ranks
(`Kind.RANK`), which the norm behind adds up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshlm.workers.moe.fused_moe import (
    NOWHERE,
    Combined,
    Dispatched,
    Quantisation,
    Quantise,
    Receiver,
    Routing,
    WeightAndReduce,
)
from meshlm.workers.partial_sum import Kind, PartialSum


def weighted_sum(out: Tensor, routing: Routing, left: WeightAndReduce) -> Tensor:
    """Contiguous results [m, k, hidden] of experts, of which `left` is to be done -> [m, hidden]."""
    if left is WeightAndReduce.DONE:
        return out
    values = out.masked_fill((routing.experts == NOWHERE)[:, :, None], 0.0)
    if left is WeightAndReduce.WEIGHTED_SUM:
        values = values.float() * routing.weights[:, :, None]
    return values.sum(dim=1, dtype=torch.float32).to(out.dtype)


def local_numbers(routing: Routing, first: int, count: int) -> Routing:
    """Numbers of experts as this rank counts its own, which begin at `first`."""
    mine = (routing.experts >= first) & (routing.experts < first + count)
    return routing._replace(experts=torch.where(mine, routing.experts - first, NOWHERE))


@dataclass(slots=True)
class NoDispatch:
    first: int  # of this rank's experts
    count: int
    num_experts: int
    kind: Kind = Kind.WHOLE  # of what it gives
    name: str = "none"
    finishes: frozenset[WeightAndReduce] = frozenset(WeightAndReduce) - {WeightAndReduce.PARTS}
    quantisations: frozenset[Quantisation] = frozenset(Quantisation)

    @property
    def overlapped(self) -> bool:
        return False

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        values, scales = quantise(x)
        if self.count < self.num_experts:
            routing = local_numbers(routing, self.first, self.count)
        given = Dispatched(values, scales, routing)
        return lambda: given

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        if left is WeightAndReduce.PARTS:
            parts = PartialSum(out, Kind.SPLIT_K)
            return lambda: parts
        whole = PartialSum(weighted_sum(out, given.routing, left), self.kind)
        return lambda: whole
