"""All-to-all: each member sends every other the rows that go to its experts, and gets their results back, which it adds up.

Shapes are fixed, so that a CUDA graph holds it: there is room for all rows of a step, and those that need not travel are NOWHERE.
Unlike with a reduce-scatter the terms of a token's sum come back as they are, and are added in float32, in the order of members.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshlm.workers.layers.partial_sum import PartialSum
from meshlm.workers.moe.dispatch.members import FINISHES, Members, packed, padding, unpacked
from meshlm.workers.moe.dispatch.none import local_numbers, weighted_sum
from meshlm.workers.moe.parts import (
    ActivationFormat,
    Combined,
    Dispatched,
    Quantisation,
    Quantise,
    Receiver,
    Routing,
    WeightAndReduce,
)


@dataclass(slots=True)
class AllToAll:
    """See `meshlm.workers.moe.parts.Dispatcher`."""

    members: Members
    name: str = "all_to_all"
    format: ActivationFormat = ActivationFormat.CONTIGUOUS
    finishes: frozenset[WeightAndReduce] = FINISHES
    quantisations: frozenset[Quantisation] = frozenset(Quantisation)

    @property
    def overlapped(self) -> bool:
        return self.members.group.pause is not None

    def most_tokens(self, tokens: int) -> int:
        return tokens * self.members.group.size

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        members, group = self.members, self.members.group
        values, scales = quantise(x)
        whole = padding(members, routing)
        of_each = [local_numbers(whole, first, members.num_experts) for first in members.firsts]
        goes = torch.stack([(one.experts >= 0).any(dim=1) for one in of_each])  # [members, rows]

        def send() -> Dispatched:
            rows = group.all_to_all(_for_each(members.padded(values), goes))
            theirs = None if scales is None else group.all_to_all(_for_each(members.padded(scales), goes))
            return Dispatched(
                rows, theirs, unpacked(group.all_to_all(torch.cat([packed(one) for one in of_each]))), None
            )

        return group.start(send)

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        assert given.routing is not None
        sums, group, num_tokens = weighted_sum(out, given.routing, left), self.members.group, len(routing.experts)
        received = group.start(lambda: group.all_to_all(sums))

        def added() -> PartialSum:
            terms = received().view(group.size, -1, sums.shape[1])[:, :num_tokens]
            return PartialSum(terms.sum(dim=0, dtype=torch.float32).to(sums.dtype), self.members.kind)

        return added


def _for_each(x: Tensor, goes: Tensor) -> Tensor:
    """[rows, n] -> [members rows, n], zeros where a row does not go."""
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(goes[:, :, None], x, zero).flatten(0, 1)
