"""One rank of test_allreduce_rmsnorm.py: a process of its own, so importable by name."""

import random
import time
from typing import Any

import torch

from meshlm.kernels.allreduce_rmsnorm import kernel

ROWS, COLUMNS, CALLS, PACKET_ROWS = 5, 72, 12, 2  # calls of one and two rows by packets, of five by flags
FIRST_TURN = 2**31 - 4  # they wrap on the way
LATE_S = 0.03


def memory_of(size: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Of each rank: packets, inbox and flags."""
    words = kernel.words(COLUMNS, dtype)
    return [
        [
            torch.zeros(2, size, ROWS, words, dtype=torch.int64).share_memory_(),
            torch.zeros(2, size, ROWS, COLUMNS, dtype=dtype).share_memory_(),
            torch.full((size, ROWS), FIRST_TURN - 1, dtype=torch.int32).share_memory_(),
        ]
        for _ in range(size)
    ]


def of_rank(rank: int, call: int, dtype: torch.dtype) -> torch.Tensor:
    rows = (1, ROWS, 2)[call % 3]
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(10 * call + rank)).to(dtype)


def workspace_of(rank: int, memory: list[list[torch.Tensor]]) -> kernel.Workspace:
    """memory: packets, inboxes and flags of each rank."""
    addresses = [torch.tensor([t.data_ptr() for t in tensors]) for tensors in zip(*memory, strict=True)]
    turns = torch.full((ROWS,), FIRST_TURN, dtype=torch.int32)
    return kernel.Workspace(
        rank, len(memory), ROWS, COLUMNS, (addresses[0], addresses[1], addresses[2]), turns, PACKET_ROWS
    )


def run_rank(rank: int, memory: list[list[torch.Tensor]], dtype: torch.dtype, answers: Any) -> None:
    torch.set_num_threads(1)
    chance = random.Random(rank)
    workspace = workspace_of(rank, memory)
    found = []
    for call in range(CALLS):
        x, residual = of_rank(rank, call, dtype), of_rank(7, call, dtype)
        if chance.random() < 0.3:
            time.sleep(chance.random() * LATE_S)  # a rank that comes late; the others may be a turn ahead by then
        normed = kernel.allreduce_rmsnorm(x, residual, torch.linspace(0.5, 1.5, COLUMNS).to(dtype), 1e-5, workspace)
        found.append((normed.tolist(), residual.tolist()))
    answers.put((rank, found))
