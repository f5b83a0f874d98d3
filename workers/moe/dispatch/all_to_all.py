"""All-to-all: each member sends every other the rows that go to its experts, and gets their results back, which it adds up.

Shapes are fixed, so that a CUDA graph holds it: there is room for all rows of a step, and those that need not travel are NOWHERE.
Unlike with a reduce-scatter the terms of a token's sum come back as they are, and are added in float32, in the order of members.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.moe.dispatch.members import Members, packed, unpacked
from meshlm.workers.moe.dispatch.none import local_numbers
from meshlm.workers.moe.parts import Dispatched, Routing


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
            return Dispatched(rows, theirs, unpacked(lines), None)

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
