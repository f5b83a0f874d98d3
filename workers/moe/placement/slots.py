"""The slots of ranks that hold experts: from experts, as a router chooses them, to slots, and how many tokens each has had; and moving
the weights of one layer's experts between slots, a piece of each at a time.

The former is on the device and of fixed shapes, so it is a part of CUDA graphs; a rearrangement writes into the same tensors. Replicas
of an expert take turns by a token's row in the step. Pieces are columns of the experts' weights, and no column needs another, so what
is received may be written while the rest still is to be sent: beside the weights there is room for two pieces and no more.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.moe.fused_moe import NOWHERE, Routing

TURNS = 60  # 2, 3, 4, 5 and 6 replicas divide it


class SlotOps(Protocol):
    def slots_of(self, experts: Tensor, table: Tensor, counts: Tensor, first: int) -> Tensor: ...


class Replicas:
    """The slots of one layer. `experts`: those that have slots here, which a placement counts from 0; others go NOWHERE. counts
    int64 [experts + 1]: tokens of each expert of the model since the start, behind those of none. rank: of the one that sends,
    since each begins with another replica."""

    def __init__(self, num_experts: int, experts: Sequence[int], rank: int, counts: Tensor) -> None:
        self._num_experts, self._experts, self._rank, self._counts = num_experts, experts, rank, counts
        shape = (num_experts + 1, TURNS)  # of none, then of each
        self._table = torch.full(shape, NOWHERE, dtype=torch.int32, device=counts.device)

    def place(self, slots: Sequence[int]) -> None:
        held: list[list[int]] = [[] for _ in self._experts]
        for slot, expert in enumerate(slots):
            held[expert].append(slot)
        rows = [[NOWHERE] * TURNS for _ in range(self._num_experts + 1)]
        for expert, own in zip(self._experts, held, strict=True):
            rows[expert + 1] = (own * TURNS)[:TURNS]
        self._table.copy_(torch.tensor(rows, dtype=torch.int32))

    def of(self, routing: Routing, ops: SlotOps) -> Routing:
        return routing._replace(experts=ops.slots_of(routing.experts, self._table, self._counts, self._rank))


PIECE = 64 << 20
"""Bytes that a rank sends or receives at a time, about."""


class Moves(NamedTuple):
    """The moves of one rank in a layer: what it copies from slot to slot of its own, and what it sends to and gets from each member."""

    copies: list[tuple[int, int]]
    sends: list[list[int]]
    takes: list[list[int]]

    @property
    def most(self) -> int:
        return max(sum(map(len, self.sends)), sum(map(len, self.takes)), len(self.copies))


def moves_of(rank: int, old: Sequence[int], new: Sequence[int], num_ranks: int) -> Moves:
    """The moves, which all ranks know of each other without a word: the ranks that hold an expert send it to others in turn."""
    each = len(old) // num_ranks
    holders: dict[int, dict[int, int]] = {}  # of an expert: ranks, and a slot there
    for slot, expert in enumerate(old):
        holders.setdefault(expert, {}).setdefault(slot // each, slot % each)
    found = Moves([], [[] for _ in range(num_ranks)], [[] for _ in range(num_ranks)])
    for slot, (before, expert) in enumerate(zip(old, new, strict=True)):
        to, own = slot // each, holders[expert]
        if before == expert:
            continue
        if to in own:
            if to == rank:
                found.copies.append((own[to], slot % each))
            continue
        source = sorted(own)[slot % len(own)]
        if source == rank:
            found.sends[to].append(own[source])
        if to == rank:
            found.takes[source].append(slot % each)
    return found


def rearrange(weights: Sequence[Tensor], old: Sequence[int], new: Sequence[int], group: ExpertGroup) -> None:
    """Makes the weights of this rank's slots in a layer, [slots, ...] each, those of `new`. All members do it. StepAborted."""
    moves = [moves_of(rank, old, new, group.size) for rank in range(group.size)]
    most, own = max(one.most for one in moves), moves[group.rank]
    sends, takes = ([slot for of in slots for slot in of] for slots in (own.sends, own.takes))
    if not most:
        return
    for weight in weights:
        lines = weight.view(len(weight), -1)
        if lines.element_size() == 1:  # 8-bit floats have no collectives everywhere
            lines = lines.view(torch.uint8)
        width = max(1, PIECE // (most * lines.element_size()))
        for begin in range(0, lines.shape[1], width):
            piece = lines[:, begin : begin + width]
            kept = piece[[source for source, _ in own.copies]]
            received = group.exchange(piece[sends], [len(of) for of in own.sends], [len(of) for of in own.takes])
            piece[takes] = received
            piece[[slot for _, slot in own.copies]] = kept
