"""What dispatchers between data-parallel ranks have in common: a step's rows, padded so that all members send as many.

Members are the workers of an `ExpertGroup`. Each has `num_experts`, and member d those that begin at `firsts[d]`; other experts,
which workers of other tensor-parallel ranks have, are NOWHERE here: their results are other terms of the ranks' sum (Kind.RANK).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.moe.parts import NOWHERE, Routing, WeightAndReduce
from meshlm.workers.partial_sum import Kind

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
        """The number of this worker's first own expert."""
        return self.firsts[self.group.rank]

    def padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        """[m, ...] -> as many rows as each member sends."""
        missing = self.group.num_tokens - x.shape[0]
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=value) if missing > 0 else x


def packed(routing: Routing) -> Tensor:
    """Experts and weights as one tensor, int32 [m, 2 k]."""
    return torch.cat((routing.experts, routing.weights.view(torch.int32)), dim=1)


def unpacked(lines: Tensor) -> Routing:
    """The opposite."""
    experts, weights = lines.chunk(2, dim=1)
    return Routing(experts.contiguous(), weights.contiguous().view(torch.float32))


def padding(members: Members, routing: Routing) -> Routing:
    """Pads a step with rows behind the last that go NOWHERE."""
    return Routing(members.padded(routing.experts, NOWHERE), members.padded(routing.weights))
