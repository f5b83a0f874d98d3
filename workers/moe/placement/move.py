"""Moves the weights of one layer's experts between the slots of ranks, a piece of each at a time.

Pieces are columns of the experts' weights, and no column needs another, so what is received may be written while the rest still
is to be sent: beside the weights there is room for two pieces and no more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.workers.distributed.expert_group import ExpertGroup

PIECE = 64 << 20
"""Bytes that a rank sends or receives at a time, about."""


class Moves(NamedTuple):
    """The moves of one rank in a layer: what it copies from slot to slot of its own, and what it sends to and gets from each member."""

    copies: list[tuple[int, int]]
    sends: list[list[int]]
    takes: list[list[int]]

    @property
    def most(self) -> int:
        """Experts that it sends or gets."""
        return max(sum(map(len, self.sends)), sum(map(len, self.takes)), len(self.copies))


def moves_of(rank: int, old: Sequence[int], new: Sequence[int], num_ranks: int) -> Moves:
    """What all ranks know of each other without a word: the ranks that hold an expert send it to others in turn."""
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
