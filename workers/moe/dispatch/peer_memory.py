"""Rows written straight into the memory of the members that have their experts, and results straight back: GPUs of one host, NVLink.

Nothing runs beside the compute stream: writes are posted, and travel by themselves until somebody waits for them
(kernels/expert_exchange). Only rows that a member needs are sent to it. Shapes are fixed, so a CUDA graph holds it. The memory is the
dispatcher's: two rooms, which two halves of a step use in turns.
"""

from torch import Tensor

from meshlm.kernels.expert_exchange import kernel
from meshlm.workers.distributed.peer_rooms import PeerRooms
from meshlm.workers.layers.partial_sum import PartialSum
from meshlm.workers.moe.dispatch.members import FINISHES, Members, unpacked
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


class PeerMemory:
    """See `meshlm.workers.moe.parts.Dispatcher`."""

    name = "peer_memory"
    format = ActivationFormat.CONTIGUOUS
    finishes = FINISHES
    quantisations = frozenset((Quantisation.NONE,))

    def __init__(self, members: Members, rooms: PeerRooms) -> None:
        firsts = members.firsts
        stride = firsts[1] - firsts[0] if len(firsts) > 1 else 0
        self._members, self._rooms = members, rooms
        self._owners = kernel.Owners(members.num_experts, stride, firsts[0])

    @property
    def overlapped(self) -> bool:
        return self._members.group.pause is not None

    def most_tokens(self, tokens: int) -> int:
        return tokens * self._members.group.size

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        group = self._members.group
        n = max(len(x), group.num_tokens)
        room = self._rooms.next(second=self.overlapped)
        kernel.send(x.contiguous(), routing.experts, routing.weights, n, room, self._owners)

        def received() -> Dispatched:
            if group.pause is not None:
                group.pause()
            kernel.wait(kernel.ROWS, room)
            rows, k = group.size * n, routing.experts.shape[1]
            return Dispatched(
                room.inbox[:rows], None, unpacked(room.lines.view(-1)[: rows * 2 * k].view(rows, 2 * k)), None
            )

        return received

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        assert given.routing is not None
        group, room = self._members.group, self._rooms.of(given.x)
        sums, n = weighted_sum(out, given.routing, left), len(given.x) // group.size
        kernel.give_back(sums, n, routing.experts.shape[1], room)

        def received() -> PartialSum:
            if group.pause is not None:
                group.pause()
            kernel.wait(kernel.RESULTS, room)
            return PartialSum(kernel.add(routing.experts, n, room, self._owners), self._members.kind)

        return received
