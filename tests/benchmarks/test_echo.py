"""A rank that is its own peers (benchmarks/echo.py): products of one row that send and receive. By the interpreter without a GPU."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

COLUMNS, INPUTS = 48, 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16


@pytest.fixture
def echo(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("echo")


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_sent_comes_back_from_all_peers(echo: ModuleType, size: int) -> None:
    comm = echo.EchoPlacement(size).connect(DEVICE, BF16, 8, COLUMNS)
    one_row = comm.one_row
    weight = torch.zeros(COLUMNS, INPUTS, dtype=BF16, device=DEVICE)
    weight[:, 3] = torch.arange(COLUMNS, device=DEVICE) % 8
    x = torch.zeros(1, INPUTS, dtype=BF16, device=DEVICE)
    x[0, 3] = 1
    norm, following = torch.ones(COLUMNS, dtype=BF16, device=DEVICE), torch.eye(16, COLUMNS, dtype=BF16, device=DEVICE)
    for _ in range(3):  # steps of two sums: both halves of the inboxes
        stream = torch.zeros(1, COLUMNS, dtype=BF16, device=DEVICE)
        sent = one_row.send(x, weight, None)
        _, stream = one_row.norm_linear(sent, stream, (norm, 1e-6), following, None, gate="")
        assert torch.equal(stream, size * weight[:, 3][None])
        normed = one_row.norm(one_row.send(x, weight, None), stream, norm, 1e-6)
        assert torch.equal(stream, 2 * size * weight[:, 3][None])
        assert (normed - torch.rms_norm(stream, (COLUMNS,), norm, 1e-6)).abs().max() < 0.03
        logits = one_row.logits(x, weight, size * COLUMNS, None)
        assert torch.equal(logits, weight[:, 3].repeat(size)[None])


def test_votes_are_those_of_all(echo: ModuleType) -> None:
    comm = echo.EchoPlacement(4).connect(DEVICE, BF16, 8, COLUMNS)
    assert comm.all_reduce(torch.ones(1, dtype=torch.int32, device=DEVICE)).item() == 4
    assert comm.allreduce_rmsnorm(torch.ones(2, COLUMNS), torch.ones(2, COLUMNS), torch.ones(COLUMNS), 1e-6) is None
