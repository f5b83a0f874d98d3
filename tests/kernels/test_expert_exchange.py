"""Rows to the experts of other ranks and back, by the interpreter: each rank's kernels in turn, on one memory."""

import pytest
import torch
from device import DEVICE, ON_GPU
from torch import Tensor

from meshlm.kernels.expert_exchange import kernel
from meshlm.kernels.expert_exchange.kernel import RESULTS, ROWS, Owners, Room

pytestmark = pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank: tests/workers/cuda/test_expert_parallel.py")
HIDDEN, K, CAPACITY, PER = 1030, 3, 8, 4


def rooms(size: int, dtype: torch.dtype) -> list[Room]:
    shared = [
        [
            torch.full((size * CAPACITY, HIDDEN), float("nan"), dtype=dtype),
            torch.full((size * CAPACITY, 2 * K), 99, dtype=torch.int32),
            torch.full((size * CAPACITY, HIDDEN), float("nan"), dtype=dtype),
            torch.zeros(2 * size, dtype=torch.int32),
        ]
        for _ in range(size)
    ]
    tables = [torch.tensor([mine[nth].data_ptr() for mine in shared], device=DEVICE) for nth in range(4)]
    stop = torch.zeros(1, dtype=torch.int32)
    keep.append(shared)
    at = [mine[0] for mine in shared], [mine[2] for mine in shared]
    return [
        Room(
            rank, inbox, lines, results, tables[0], tables[1], tables[2], tables[3], torch.zeros(2, dtype=torch.int32), stop,
            *at,
        )
        for rank, (inbox, lines, results, _) in enumerate(shared)
    ]  # fmt: skip


keep: list[object] = []
"""Memory whose addresses are in tables."""


def chosen(m: int, num_experts: int) -> Tensor:
    found = torch.stack([torch.randperm(num_experts)[:K] for _ in range(m)]) if m else torch.zeros(0, K)
    return torch.where(torch.rand(m, K) < 0.2, -1, found).int()


@pytest.mark.parametrize(("dtype", "whole"), [(torch.float32, False), (torch.float16, False), (torch.float32, True)])
@pytest.mark.parametrize(("size", "offset"), [(2, 0), (3, 0), (2, PER)])
def test_rows_come_to_their_experts_and_their_sums_back(
    size: int, offset: int, dtype: torch.dtype, whole: bool
) -> None:
    """For three steps of other sizes. offset: of two tensor-parallel ranks this is the second; the first has other experts."""
    stride = PER * (2 if offset else 1)
    owners, ranks = Owners(PER, stride, offset), rooms(size, dtype)
    for n, counts in ((5, [5, 2, 0]), (1, [0, 1, 1]), (8, [8, 8, 8])):
        given = [(torch.randn(m, HIDDEN).to(dtype), chosen(m, size * stride), torch.rand(m, K)) for m in counts[:size]]
        for room, (x, experts, weights) in zip(ranks, given, strict=True):
            kernel.send(x, experts, weights, n, room, owners, whole=whole)
        expected = [torch.zeros(m, HIDDEN) for m in counts[:size]]
        for me, room in enumerate(ranks):
            kernel.wait(ROWS, room)
            sums = torch.full((size * n, HIDDEN), float("nan"), dtype=dtype)
            lines = room.lines.view(-1)[: size * n * 2 * K].view(size * n, 2 * K)
            for peer, (x, experts, weights) in enumerate(given):
                for row in range(n):
                    local, bits = lines[peer * n + row].split(K)
                    first = me * stride + offset
                    theirs = experts[row] if row < len(x) else torch.full((K,), -1)
                    mine = (theirs >= first) & (theirs < first + PER)
                    assert torch.equal(local, torch.where(mine, theirs - first, -1).int())
                    if mine.any():
                        assert torch.equal(room.inbox[peer * n + row], x[row])
                        assert torch.equal(bits.view(torch.float32)[mine], weights[row][mine])
                        sums[peer * n + row] = x[row] * (me + 1)
                        expected[peer][row] += x[row].float() * (me + 1)
            kernel.give_back(sums, n, K, room, whole=whole)
        for room, (_, experts, _), wanted in zip(ranks, given, expected, strict=True):
            kernel.wait(RESULTS, room)
            found = kernel.add(experts, n, room, owners)
            torch.testing.assert_close(found.float(), wanted, atol=1e-2, rtol=1e-2)
        assert all(room.turns.tolist() == ranks[0].turns.tolist() for room in ranks)


def test_nobody_waits_once_it_is_stopped() -> None:
    one, _ = rooms(2, torch.float32)
    kernel.send(torch.ones(1, HIDDEN), torch.zeros(1, K).int(), torch.ones(1, K), 1, one, Owners(PER, PER, 0))
    one.stop.fill_(1)
    kernel.wait(ROWS, one)
