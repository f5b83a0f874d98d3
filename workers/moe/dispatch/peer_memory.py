"""Rows written straight into the memory of the members that have their experts, and results straight back: GPUs of one host, NVLink.

Rows are written by the compute stream itself, each to the members that need it: writes are posted, and travel by themselves until
somebody waits for them (kernels/expert_exchange). Of halves that take turns many rows are copied, all of them, by the GPU's copy
engines: that takes longer, beside what the other half computes. Shapes are fixed, so a CUDA graph holds it. The memory is the
dispatcher's: two rooms, which two halves of a step use in turns.
"""

from functools import partial

from torch import Tensor

from meshlm.kernels.expert_exchange import kernel
from meshlm.workers.distributed.peer_rooms import PeerRooms
from meshlm.workers.moe import fused_moe
from meshlm.workers.moe.dispatch.collective import FINISHES, Members, unpacked
from meshlm.workers.moe.dispatch.none import weighted_sum
from meshlm.workers.partial_sum import PartialSum

COPIED = 512
"""Rows of a member from which on a half's are copied."""


class PeerMemory:
    name = "peer_memory"
    finishes = FINISHES
    quantisations = frozenset((fused_moe.Quantisation.NONE,))

    def __init__(self, members: Members, rooms: PeerRooms) -> None:
        firsts = members.firsts
        stride = firsts[1] - firsts[0] if len(firsts) > 1 else 0
        self._members, self._rooms, self.copied = members, rooms, COPIED
        self._owners = kernel.Owners(members.num_experts, stride, firsts[0])

    @property
    def overlapped(self) -> bool:
        return self._members.group.pause is not None

    def _whole(self, num_rows: int) -> bool:
        return self.overlapped and num_rows >= self.copied

    def prepare_async(self, x: Tensor, routing: fused_moe.Routing, quantise: fused_moe.Quantise) -> fused_moe.Receiver:
        group, rows = self._members.group, x.contiguous()
        n = max(len(x), group.num_tokens)
        whole, room = self._whole(n), self._rooms.next(second=self.overlapped)
        send = partial(kernel.send, rows, *routing, n, room, self._owners, whole=whole)
        sent = group.start(send, beside=whole)

        def received() -> fused_moe.Dispatched:
            sent()
            kernel.wait(kernel.ROWS, room)
            num_rows, k = group.size * n, routing.experts.shape[1]
            lines = room.lines.view(-1)[: num_rows * 2 * k].view(num_rows, 2 * k)
            return fused_moe.Dispatched(room.inbox[:num_rows], None, unpacked(lines))

        return received

    def combine_async(
        self, out: Tensor, given: fused_moe.Dispatched, routing: fused_moe.Routing, left: fused_moe.WeightAndReduce
    ) -> fused_moe.Combined:
        group, room = self._members.group, self._rooms.of(given.x)
        sums, n, k = weighted_sum(out, given.routing, left), len(given.x) // group.size, routing.experts.shape[1]
        whole = self._whole(n)
        sent = group.start(partial(kernel.give_back, sums, n, k, room, whole=whole), beside=whole)

        def received() -> PartialSum:
            sent()
            kernel.wait(kernel.RESULTS, room)
            return PartialSum(kernel.add(routing.experts, n, room, self._owners), self._members.kind)

        return received
