"""The sum over ranks with its norm, each rank a process of its own with the others' memory mapped."""

import multiprocessing

import pytest
import torch
from device import ON_GPU, near
from sum_norm_rank import CALLS, COLUMNS, FIRST_TURN, ROWS, of_rank, run_rank

from meshlm.kernels.sum_norm import kernel, reference

pytestmark = pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank; make_symmetric proves it at each start")


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


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (2, torch.bfloat16)])
def test_every_rank_gets_the_same_sum(size: int, dtype: torch.dtype) -> None:
    context = multiprocessing.get_context("spawn")
    memory = memory_of(size, dtype)
    answers = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, memory, dtype, answers)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        found = dict(answers.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert all(found[rank] == found[0] for rank in range(size)), "bit for bit"
    for call in range(CALLS):
        parts = [of_rank(rank, call, dtype) for rank in range(size)]
        weight = torch.linspace(0.5, 1.5, COLUMNS).to(dtype)
        wanted = reference.sum_norm(parts, of_rank(7, call, dtype), weight, 1e-5)
        for got, expected in zip(found[0][call], wanted, strict=True):
            near(torch.tensor(got), expected, dtype)
