"""A dispatcher of collectives: all members send as many rows at the same time, by one of the ways beside this module.

On a GPU collectives run in a stream of their own, beside what is computed until their result is asked for (`ExpertGroup.start`).
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.moe.dispatch.members import FINISHES, Members, padding
from meshlm.workers.moe.dispatch.none import weighted_sum
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
from meshlm.workers.partial_sum import PartialSum


class Way(Protocol):
    """Which collectives bring rows to experts, and which bring results back. Rows and routings are padded already."""

    name: str

    def sending(self, members: Members, x: Tensor, scales: Tensor | None, routing: Routing) -> Callable[[], Dispatched]:
        """What is called to send; what is computed before it need not wait for the rows of others."""
        ...

    def give_back(self, group: ExpertGroup, sums: Tensor) -> Tensor:
        """Send [members rows, hidden] back to where rows came from."""
        ...

    def added(self, group: ExpertGroup, received: Tensor, num_tokens: int) -> Tensor:
        """What has come back -> the sums [num_tokens, hidden] of this rank's own rows."""
        ...


class Collective:
    format = ActivationFormat.CONTIGUOUS
    finishes = FINISHES
    quantisations = frozenset(Quantisation)

    def __init__(self, members: Members, way: Way) -> None:
        self.members, self.way, self.name = members, way, way.name

    @property
    def overlapped(self) -> bool:
        return self.members.group.pause is not None

    def most_tokens(self, tokens: int) -> int:
        return tokens * self.members.group.size

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        members = self.members
        values, scales = quantise(x)
        of_rows = None if scales is None else members.padded(scales)
        return members.group.start(
            self.way.sending(members, members.padded(values), of_rows, padding(members, routing))
        )

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        assert given.routing is not None
        sums, group, num_tokens = weighted_sum(out, given.routing, left), self.members.group, len(routing.experts)
        received = group.start(lambda: self.way.give_back(group, sums))
        return lambda: PartialSum(self.way.added(group, received(), num_tokens), self.members.kind)
