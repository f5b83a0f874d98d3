"""Operations by Triton's kernels, where they differ from torch's in more than speed."""

import pytest
import torch

pytest.importorskip("triton")

from meshlm.workers.layers.triton_ops import TritonOps

if torch.cuda.is_available():
    pytest.skip("by the interpreter; tests/kernels has the GPU", allow_module_level=True)


def test_rows_of_ids_that_nobody_has_written_yet() -> None:
    """While kernels are compiled ahead, a step's ids are what was in memory, and on a GPU torch's lookup would stop there."""
    table = torch.arange(12.0).view(4, 3)
    ids = torch.tensor([2, 1 << 40, -7, 3])
    assert TritonOps().rows(ids, table, 3).tolist() == [[6, 7, 8], [0, 0, 0], [0, 0, 0], [9, 10, 11]]
