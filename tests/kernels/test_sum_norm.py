"""The sum over ranks with its norm, each rank a process of its own with the others' memory mapped."""

import multiprocessing

import pytest
import torch
from device import ON_GPU, near
from sum_norm_rank import CALLS, COLUMNS, ROWS, SIZE, of_rank, run_rank

from meshlm.kernels.sum_norm import reference

pytestmark = pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank; make_symmetric proves it at each start")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_every_rank_gets_the_same_sum() -> None:
    context = multiprocessing.get_context("spawn")
    inboxes = [torch.zeros(2, SIZE, ROWS, COLUMNS).share_memory_() for _ in range(SIZE)]
    flags = [torch.full((SIZE, ROWS), 2**31 - 5, dtype=torch.int32).share_memory_() for _ in range(SIZE)]
    answers = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, inboxes, flags, answers)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    try:
        found = dict(answers.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert found[0] == found[1], "bit for bit"
    for call in range(CALLS):
        parts = [of_rank(rank, call) for rank in range(SIZE)]
        wanted = reference.sum_norm(parts, of_rank(7, call), torch.linspace(0.5, 1.5, COLUMNS), 1e-5)
        for got, expected in zip(found[0][call], wanted, strict=True):
            near(torch.tensor(got), expected, torch.float32)
