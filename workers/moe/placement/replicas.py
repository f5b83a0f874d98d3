"""From experts, as a router chooses them, to the slots of ranks that hold them; and how many tokens each expert has had.

All of it is on the device and of fixed shapes, so it is a part of CUDA graphs; a rearrangement writes into the same tensors. Replicas
of an expert take turns by a token's row in the step. They have the same weights, so it does not matter which one computes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshlm.workers.moe.parts import NOWHERE, Routing

TURNS = 60  # 2, 3, 4, 5 and 6 replicas divide it


class Replicas:
    """Of one layer. `experts`: those that have slots here, which a placement counts from 0; others go NOWHERE.

    counts int64 [experts + 1]: tokens of each expert of the model since the start, behind those of none. turns int64 [rows, 1]: of
    all layers, as `turns_of` makes them.
    """

    def __init__(self, num_experts: int, experts: Sequence[int], turns: Tensor, counts: Tensor) -> None:
        self._num_experts, self._experts, self._turns, self._counts = num_experts, experts, turns, counts
        self._one = torch.ones((), dtype=counts.dtype, device=counts.device)
        self._table = torch.full(
            (num_experts + 1, TURNS), NOWHERE, dtype=torch.int32, device=turns.device
        )  # of none, then of each

    def place(self, slots: Sequence[int]) -> None:
        """From now on these slots hold these experts."""
        held: list[list[int]] = [[] for _ in self._experts]
        for slot, expert in enumerate(slots):
            held[expert].append(slot)
        rows = [[NOWHERE] * TURNS for _ in range(self._num_experts + 1)]
        for expert, own in zip(self._experts, held, strict=True):
            rows[expert + 1] = (own * TURNS)[:TURNS]
        self._table.copy_(torch.tensor(rows, dtype=torch.int32))

    def of(self, routing: Routing) -> Routing:
        """The same with slots for experts; counts them."""
        line = routing.experts + 1
        self._counts.index_add_(0, line.flatten(), self._one.expand(line.numel()))
        return routing._replace(experts=self._table.take(torch.add(self._turns[: len(line)], line, alpha=TURNS)))


def turns_of(rows: int, rank: int, device: torch.device) -> Tensor:
    """For steps of up to so many rows: ranks begin with different replicas."""
    return ((torch.arange(rows, device=device) + rank) % TURNS)[:, None]
