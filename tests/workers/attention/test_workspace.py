"""The room of split contexts never moves once it has been used: graphs keep its address (no GPU)."""

import pytest
import torch

pytest.importorskip("triton")
from meshlm.kernels.attention.tiles import most_parts_of, splits_of
from meshlm.workers.attention import triton_backend
from meshlm.workers.attention.triton_backend import Workspace

HOPPER = (4.0, 132)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(8, 2, 128), (32, 1, 128), (96, 1, 256), (128, 4, 64)])
def test_it_stays_where_the_first_decode_has_put_it(num_heads: int, num_kv_heads: int, dim: int) -> None:
    """Whatever the first one was, and with room for all that follow."""
    workspace = Workspace(torch.device("cpu"), most_parts_of(*HOPPER))
    workspace.of(1024, (num_heads, num_kv_heads), 1, dim)
    parts, _, counters = workspace.of(1, (num_heads, num_kv_heads), splits_of(num_kv_heads, *HOPPER), dim)
    for requests in range(1, 1026):
        splits = splits_of(requests * num_kv_heads, *HOPPER)
        found, sums, _ = workspace.of(requests, (num_heads, num_kv_heads), splits, dim)
        if splits > 1:
            assert found.data_ptr() == parts.data_ptr()
            assert found.numel() == requests * num_heads * splits * dim
            assert sums.numel() >= requests * num_heads * splits * 2
            assert counters.numel() >= requests * num_kv_heads


def test_some_heads_need_more_than_it_begins_with() -> None:
    """32 queries to a key of 128: the case that once moved it while a graph was captured."""
    assert most_parts_of(*HOPPER) * 32 * (128 + 2) > triton_backend.WORKSPACE_FLOATS
