"""What dispatchers between data-parallel ranks have in common: a step's rows, padded so that all members send as many.

Members are the workers of an `ExpertGroup`. Each has `num_experts`, and member d those that begin at `firsts[d]`; other experts,
which workers of other tensor-parallel ranks have, are NOWHERE here: their results are other terms of the ranks' sum (Kind.RANK).

A dispatcher of collectives: all members send as many rows at the same time, by one of the ways beside this module.

On a GPU collectives run in a stream of their own, beside what is computed until their result is asked for (`ExpertGroup.start`).

All-gather and reduce-scatter: every member gets all members' rows, computes those of its experts, and the results are summed up.

The traffic does not depend on the routing: each row goes to all. With many experts a token that is what it takes anyway on two or four
ranks. vLLM calls it allgather_reducescatter.

All-to-all: each member sends every other the rows that go to its experts, and gets their results back, which it adds up.

Shapes are fixed, so that a CUDA graph holds it: there is room for all rows of a step, and those that need not travel are NOWHERE.
Unlike with a reduce-scatter the terms of a token's sum come back as they are, and are added in float32, in the order of members.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.moe.dispatch.none import local_numbers, weighted_sum
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

FINISHES = frozenset((WeightAndReduce.DONE, WeightAndReduce.SUM, WeightAndReduce.WEIGHTED_SUM))
"""What experts may leave to dispatchers between ranks: one row of each token is what travels back."""


class Members(NamedTuple):
    """The workers that share experts, and who has which."""

    group: ExpertGroup
    firsts: tuple[int, ...]
    num_experts: int  # of each
    kind: Kind  # of the sums that come back

    @property
    def first(self) -> int:
        return self.firsts[self.group.rank]

    def padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        """[m, ...] -> as many rows as each member sends."""
        missing = self.group.num_tokens - x.shape[0]
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=value) if missing > 0 else x


def packed(routing: Routing) -> Tensor:
    """Experts and weights as one tensor, int32 [m, 2 k]."""
    return torch.cat((routing.experts, routing.weights.view(torch.int32)), dim=1)


def unpacked(lines: Tensor) -> Routing:
    experts, weights = lines.chunk(2, dim=1)
    return Routing(experts.contiguous(), weights.contiguous().view(torch.float32))


def padding(members: Members, routing: Routing) -> Routing:
    """Pads a step with rows behind the last that go NOWHERE."""
    return Routing(members.padded(routing.experts, NOWHERE), members.padded(routing.weights))


class Way(Protocol):
    """Which collectives bring rows to experts, and which bring results back. Rows and routings are padded already."""

    name: str

    def sending(self, members: Members, x: Tensor, scales: Tensor | None, routing: Routing) -> Callable[[], Dispatched]:
        """The function that sends; what is computed before it need not wait for the rows of others."""

    def give_back(self, group: ExpertGroup, sums: Tensor) -> Tensor:
        """Send [members rows, hidden] back to where rows came from."""

    def added(self, group: ExpertGroup, received: Tensor, num_tokens: int) -> Tensor:
        """Adds what has come back -> the sums [num_tokens, hidden] of this rank's own rows."""


class Collective:
    finishes = FINISHES
    quantisations = frozenset(Quantisation)

    def __init__(self, members: Members, way: Way) -> None:
        self.members, self.way, self.name = members, way, way.name

    @property
    def overlapped(self) -> bool:
        return self.members.group.pause is not None

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        members = self.members
        values, scales = quantise(x)
        of_rows = None if scales is None else members.padded(scales)
        return members.group.start(
            self.way.sending(members, members.padded(values), of_rows, padding(members, routing))
        )

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        sums, group, num_tokens = weighted_sum(out, given.routing, left), self.members.group, len(routing.experts)
        received = group.start(lambda: self.way.give_back(group, sums))
        return lambda: PartialSum(self.way.added(group, received(), num_tokens), self.members.kind)


class AllGather:
    name = "allgather_reducescatter"

    def sending(self, members: Members, x: Tensor, scales: Tensor | None, routing: Routing) -> Callable[[], Dispatched]:
        group, lines = members.group, packed(routing)

        def send() -> Dispatched:
            rows = group.all_gather(x)
            theirs = None if scales is None else group.all_gather(scales)
            of_rows = local_numbers(unpacked(group.all_gather(lines)), members.first, members.num_experts)
            return Dispatched(rows, theirs, of_rows)

        return send

    def give_back(self, group: ExpertGroup, sums: Tensor) -> Tensor:
        return group.reduce_scatter(sums)

    def added(self, group: ExpertGroup, received: Tensor, num_tokens: int) -> Tensor:
        return received[:num_tokens]


class AllToAll:
    name = "all_to_all"

    def sending(self, members: Members, x: Tensor, scales: Tensor | None, routing: Routing) -> Callable[[], Dispatched]:
        group = members.group
        of_each = [local_numbers(routing, first, members.num_experts) for first in members.firsts]
        goes = torch.stack([(one.experts >= 0).any(dim=1) for one in of_each])  # [members, rows]

        def send() -> Dispatched:
            rows = group.all_to_all(_for_each(x, goes))
            theirs = None if scales is None else group.all_to_all(_for_each(scales, goes))
            lines = group.all_to_all(torch.cat([packed(one) for one in of_each]))
            return Dispatched(rows, theirs, unpacked(lines))

        return send

    def give_back(self, group: ExpertGroup, sums: Tensor) -> Tensor:
        return group.all_to_all(sums)

    def added(self, group: ExpertGroup, received: Tensor, num_tokens: int) -> Tensor:
        terms = received.view(group.size, -1, received.shape[1])[:, :num_tokens]
        return terms.sum(dim=0, dtype=torch.float32).to(received.dtype)


def _for_each(x: Tensor, goes: Tensor) -> Tensor:
    """[rows, n] -> [members rows, n], zeros where a row does not go."""
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(goes[:, :, None], x, zero).flatten(0, 1)
