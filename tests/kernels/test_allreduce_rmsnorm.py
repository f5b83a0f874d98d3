"""The sum over ranks with its norm, each rank a process of its own with the others' memory mapped."""

import pytest
import torch
from allreduce_rmsnorm_rank import CALLS, COLUMNS, memory_of, of_rank, run_rank
from device import ON_GPU, near
from ranks import answers_of

from meshlm.kernels.allreduce_rmsnorm import reference

pytestmark = pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank; make_symmetric proves it at each start")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (2, torch.bfloat16)])
def test_every_rank_gets_the_same_sum(size: int, dtype: torch.dtype) -> None:
    found = answers_of(size, run_rank, memory_of(size, dtype), dtype)
    assert all(found[rank] == found[0] for rank in range(size)), "bit for bit"
    for call in range(CALLS):
        parts = [of_rank(rank, call, dtype) for rank in range(size)]
        weight = torch.linspace(0.5, 1.5, COLUMNS).to(dtype)
        wanted = reference.allreduce_rmsnorm(parts, of_rank(7, call, dtype), weight, 1e-5)
        for got, expected in zip(found[0][call], wanted, strict=True):
            near(torch.tensor(got), expected, dtype)
