"""From experts, as a router chooses them, to the slots of ranks that hold them; and how many tokens each expert has had.

All of it is on the device and of fixed shapes, so it is a part of CUDA graphs; a rearrangement writes into the same tensors. Replicas
of an expert take turns by a token's row in the step. They have the same weights, so it does not matter which one computes it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshlm.workers.moe.parts import NOWHERE, Routing

TURNS = 60  # 2, 3, 4, 5 and 6 replicas divide it


class SlotOps(Protocol):
    """The part of `Ops` that this needs."""

    def slots_of(self, experts: Tensor, table: Tensor, counts: Tensor, first: int) -> Tensor: ...


class Replicas:
    """The slots of one layer. `experts`: those that have slots here, which a placement counts from 0; others go NOWHERE.

    counts int64 [experts + 1]: tokens of each expert of the model since the start, behind those of none. rank: of the one that sends,
    since each begins with another replica.
    """

    def __init__(self, num_experts: int, experts: Sequence[int], rank: int, counts: Tensor) -> None:
        self._num_experts, self._experts, self._rank, self._counts = num_experts, experts, rank, counts
        shape = (num_experts + 1, TURNS)  # of none, then of each
        self._table = torch.full(shape, NOWHERE, dtype=torch.int32, device=counts.device)

    def place(self, slots: Sequence[int]) -> None:
        """From now on these slots hold these experts."""
        held: list[list[int]] = [[] for _ in self._experts]
        for slot, expert in enumerate(slots):
            held[expert].append(slot)
        rows = [[NOWHERE] * TURNS for _ in range(self._num_experts + 1)]
        for expert, own in zip(self._experts, held, strict=True):
            rows[expert + 1] = (own * TURNS)[:TURNS]
        self._table.copy_(torch.tensor(rows, dtype=torch.int32))

    def of(self, routing: Routing, ops: SlotOps) -> Routing:
        """The same with slots for experts; counts them."""
        return routing._replace(experts=ops.slots_of(routing.experts, self._table, self._counts, self._rank))
