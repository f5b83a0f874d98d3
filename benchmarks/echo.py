"""One rank of a tensor-parallel group alone on its GPU: what it sends comes back as what every peer sends.

The kernels are those of a real group, their packets and polls too; only the link is missing. So a rank of any group can be timed
and tuned on one GPU (tune_step.py --tp). Sums are of equal parts, so the tokens mean nothing.
"""

import torch
from torch import Tensor

from meshlm.kernels.allreduce_rmsnorm import kernel
from meshlm.workers.distributed.communicator import FUSED_ROWS, Communicator, side_by_side
from meshlm.workers.distributed.one_row import OneRow
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.distributed.shard import Shard


class Echo:
    """See `meshlm.workers.distributed.communicator.Communicator`; of rank 0."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype, columns: int) -> None:
        self._size, self._device = size, device
        self._memory: list[Tensor] = []
        packets = self._inboxes(2 * size * FUSED_ROWS * kernel.words(columns, dtype))
        turns = torch.ones(FUSED_ROWS, dtype=torch.int32, device=device)
        room = kernel.Workspace(0, size, FUSED_ROWS, columns, (packets, packets, packets), turns, FUSED_ROWS)
        self.one_row = OneRow(room, self._inboxes)

    def _inboxes(self, count: int) -> Tensor:
        """Addresses by rank: of this GPU's own inbox, moved such that the place of rank 0 is that of each rank in turn."""
        memory = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._memory.append(memory)
        place_bytes = memory.numel() // (2 * self._size) * memory.element_size()
        addresses = [memory.data_ptr() + rank * place_bytes for rank in range(self._size)]
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.mul_(self._size)

    def allreduce_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        return side_by_side([x] * self._size, width, out)

    def send(self, x: Tensor) -> None:
        raise AssertionError("there is no next stage")

    def receive(self, into: Tensor) -> None:
        raise AssertionError("there is no stage before")


class EchoPlacement(WorkerPlacement):
    """The place of rank 0 of so many; it meets nobody."""

    def __init__(self, size: int) -> None:
        super().__init__(Shard(tp_size=size))

    def connect(self, device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Communicator:
        return Echo(self.shard.tp_size, device, dtype, hidden)
