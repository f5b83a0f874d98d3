"""The memory through which members of an expert group write to one another: torch's symmetric memory, on GPUs of one host.

Owned by the expert group, which maps its peers' memory anew in each epoch. There are two rooms, for two halves of a step that take
turns. As long as no peer is there, and once one is gone, nobody waits in them.
"""

import time
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshlm.kernels.expert_exchange import kernel
from meshlm.kernels.expert_exchange.kernel import Room
from meshlm.runtime.errors import ProcessFatal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


SELF_TEST_S = 20.0  # for kernels that are compiled, on each of the ranks


def check_peers(device: torch.device) -> None:
    """ProcessFatal where GPUs of this host cannot map each other's memory."""
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            raise ProcessFatal(
                f"--all2all-backend peer_memory: GPU {device.index} does not reach the memory of GPU {other}; "
                "use allgather_reducescatter or all_to_all, or show it other GPUs (CUDA_VISIBLE_DEVICES)"
            )


class PeerRooms:
    """For up to `capacity` rows of each of `size` members, with k experts each."""

    def __init__(
        self, rank: int, size: int, capacity: int, hidden: int, k: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rank, self._size, self._k, self._next = rank, size, k, 0
        self.stop = torch.ones(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._shared: list[Tensor] = []
        self._rooms: list[Room] = []
        for _ in range(2):
            rows = size * capacity
            inbox, results = (_symmetric((rows, hidden), dtype, device) for _ in range(2))
            lines = _symmetric((rows, 2 * k), torch.int32, device)
            mine = [inbox, lines, results, _symmetric((2 * size,), torch.int32, device)]
            at = [torch.full((size,), one.data_ptr(), dtype=torch.int64, device=device) for one in mine]
            turns = torch.zeros(2, dtype=torch.int32, device=device)
            self._shared += mine
            own = [inbox] * size, [results] * size
            self._rooms.append(Room(rank, inbox, lines, results, at[0], at[1], at[2], at[3], turns, self.stop, *own))

    def meet(self, name: Any, store: "Store", nccl: Any) -> None:
        """Map the peers' memory. Collective; all must have met once more before anything is sent.

        name: of the group, new in each epoch. store, nccl: torch's, through which the members have met."""
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

        group = torch.distributed.ProcessGroup(store, self._rank, self._size)  # by whose store handles are exchanged
        group._register_backend(torch.device("cuda"), torch.distributed.ProcessGroup.BackendType.NCCL, nccl)
        group._set_group_name(name)
        _register_process_group(name, group)
        try:
            handles = [_SymmetricMemory.rendezvous(one, name) for one in self._shared]
        finally:
            _unregister_process_group(name)
        for nth, room in enumerate(self._rooms):
            tables, shared = (
                (room.inboxes, room.lines_of, room.results_of, room.flags_of),
                handles[4 * nth : 4 * nth + 4],
            )
            for table, handle in zip(tables, shared, strict=True):
                table.copy_(torch.tensor(handle.buffer_ptrs, dtype=torch.int64))
            for tensors, own, handle in (
                (room.inbox_at, room.inbox, shared[0]),
                (room.results_at, room.results, shared[2]),
            ):
                tensors[:] = [handle.get_buffer(rank, own.shape, own.dtype) for rank in range(self._size)]
            room.turns.zero_()
            self._shared[4 * nth + 3].zero_()
        torch.cuda.synchronize()
        self.stop.zero_()

    def self_test(self) -> None:
        """Exchanges whose results are known, through each room. ProcessFatal when it is wrong or does not end. Collective."""
        for room, whole in product(self._rooms, (False, True)):
            k, hidden, owners = self._k, room.inbox.shape[1], kernel.Owners(1, 1, 0)
            x = torch.full((2, hidden), self._rank + 1.0 + whole, dtype=room.inbox.dtype, device=room.inbox.device)
            to = torch.full((2, k), -1, dtype=torch.int32, device=x.device)
            to[:, 0] = torch.tensor([0, self._size - 1])
            kernel.send(x, to, torch.ones(2, k, device=x.device), 2, room, owners, whole=whole)
            kernel.wait(kernel.ROWS, room)
            kernel.give_back(room.inbox[: 2 * self._size] * (self._rank + 1), 2, k, room, whole=whole)
            kernel.wait(kernel.RESULTS, room)
            found = kernel.add(to, 2, room, owners)
            _finish(self.stop)
            if not torch.equal(found, torch.stack((x[0], x[1] * self._size))):
                raise ProcessFatal(
                    "--all2all-backend peer_memory: GPUs read something else than their peers wrote; use another"
                )

    def leave(self) -> None:
        """Whatever waits for peers goes on, with whatever is there."""
        self.stop.fill_(1)

    def next(self, *, second: bool) -> Room:
        """For the rows that are sent now. second: another half of the step is on its way too."""
        self._next = 1 - self._next if second else 0
        return self._rooms[self._next]

    def of(self, rows: Tensor) -> Room:
        memory = rows.untyped_storage().data_ptr()  # there are no rows where nobody has a token
        return next(room for room in self._rooms if room.inbox.untyped_storage().data_ptr() == memory)


def _finish(stop: Tensor) -> None:
    """Wait for the device, though a peer may never write. ProcessFatal."""
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + SELF_TEST_S
    while not done.query():
        if time.monotonic() > until:
            stop.fill_(1)
            raise ProcessFatal("--all2all-backend peer_memory: what a GPU writes does not reach its peers; use another")
        time.sleep(0.001)


def _symmetric(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that peers can map."""
    if device.type == "cpu":
        return torch.zeros(shape, dtype=dtype)
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.empty(shape, dtype=dtype, device=device).zero_()
