"""All-gather and reduce-scatter: every member gets all members' rows, computes those of its experts, and the results are summed up.

The traffic does not depend on the routing: each row goes to all. With many experts a token that is what it takes anyway on two or four
ranks. vLLM calls it allgather_reducescatter.
"""

from collections.abc import Callable

from torch import Tensor

from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.moe.dispatch.members import Members, packed, unpacked
from meshlm.workers.moe.dispatch.none import local_numbers
from meshlm.workers.moe.parts import Dispatched, Routing


class AllGather:
    name = "allgather_reducescatter"

    def sending(self, members: Members, x: Tensor, scales: Tensor | None, routing: Routing) -> Callable[[], Dispatched]:
        group, lines = members.group, packed(routing)

        def send() -> Dispatched:
            rows = group.all_gather(x)
            theirs = None if scales is None else group.all_gather(scales)
            of_rows = local_numbers(unpacked(group.all_gather(lines)), members.first, members.num_experts)
            return Dispatched(rows, theirs, of_rows, None)

        return send

    def give_back(self, group: ExpertGroup, sums: Tensor) -> Tensor:
        return group.reduce_scatter(sums)

    def added(self, group: ExpertGroup, received: Tensor, num_tokens: int) -> Tensor:
        return received[:num_tokens]
