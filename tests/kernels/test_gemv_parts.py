"""Products that send their parts of a sum, and products that receive it, each rank a process of its own."""

import pytest
import torch
from allreduce_rmsnorm_rank import memory_of
from device import ON_GPU, near
from gemv_rank import run_rank, wanted
from ranks import answers_of

from meshlm.kernels.gemv import kernel

pytestmark = pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank; make_symmetric proves it at each start")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_steps_of_sums_without_a_kernel_for_them() -> None:
    size = 4
    found = answers_of(size, run_rank, memory_of(size, torch.bfloat16))
    assert all(found[rank] == found[0] for rank in range(size)), "bit for bit"
    for got, expected in zip(found[0], wanted(size), strict=True):
        for one, other in zip(got, expected, strict=True):
            near(torch.tensor(one), other, torch.bfloat16, 6.0)  # the interpreter cuts where it should round


def test_tiles_of_products_that_send_or_receive() -> None:
    for way in ("sends", "receives"):
        for inputs in (1024, 2048, 4096, 8192, 16384):
            block_n, warps, stages, programs = kernel.shape_of(4096, inputs, False, way)
            assert block_n >= 1 and warps in (1, 2, 4, 8, 16) and stages >= 2 and programs >= 1  # noqa: PT018
