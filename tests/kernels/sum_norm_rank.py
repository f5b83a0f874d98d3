"""One rank of test_sum_norm.py: a process of its own, so importable by name."""

from typing import Any

import torch

from meshlm.kernels.sum_norm import kernel

SIZE, ROWS, COLUMNS, CALLS = 2, 5, 72, 9


def of_rank(rank: int, call: int) -> torch.Tensor:
    rows = (1, ROWS, 2)[call % 3]
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(10 * call + rank))


def run_rank(rank: int, inboxes: list[torch.Tensor], flags: list[torch.Tensor], answers: Any) -> None:
    torch.set_num_threads(1)
    addresses = tuple(torch.tensor([t.data_ptr() for t in tensors]) for tensors in (inboxes, flags))
    turns = torch.full((ROWS,), 2**31 - 4, dtype=torch.int32)  # they wrap on the way
    room = kernel.Room(rank, SIZE, ROWS, COLUMNS, (addresses[0], addresses[1]), turns)
    found = []
    for call in range(CALLS):
        x, residual = of_rank(rank, call), of_rank(7, call)
        normed = kernel.sum_norm(x, residual, torch.linspace(0.5, 1.5, COLUMNS), 1e-5, room)
        found.append((normed.tolist(), residual.tolist()))
    answers.put((rank, found))
