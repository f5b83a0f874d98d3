"""All-gather and reduce-scatter: every member gets all members' rows, computes those of its experts, and the results are summed up.

The traffic does not depend on the routing: each row goes to all. With many experts a token that is what it takes anyway on two or four
ranks. vLLM calls it allgather_reducescatter.
"""

from dataclasses import dataclass

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
class AllGather:
    """See `meshlm.workers.moe.parts.Dispatcher`."""

    members: Members
    name: str = "allgather_reducescatter"
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
        lines = packed(padding(members, routing))

        def send() -> Dispatched:
            rows = group.all_gather(members.padded(values))
            theirs = None if scales is None else group.all_gather(members.padded(scales))
            of_rows = local_numbers(unpacked(group.all_gather(lines)), members.first, members.num_experts)
            return Dispatched(rows, theirs, of_rows, None)

        return group.start(send)

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        assert given.routing is not None
        sums, group, num_tokens = weighted_sum(out, given.routing, left), self.members.group, len(routing.experts)
        received = group.start(lambda: group.reduce_scatter(sums))
        return lambda: PartialSum(received()[:num_tokens], self.members.kind)
