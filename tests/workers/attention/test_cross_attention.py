"""Attention to what an encoder left: each backend gives the same, for decodes, prompts, padding and any number of heads."""

from dataclasses import replace

import pytest
import torch
from small_models import batch_of

pytest.importorskip("triton")

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.cpu.library import library
from meshlm.workers.attention import triton_backend
from meshlm.workers.attention.aux_stream import AuxStream
from meshlm.workers.attention.cpu_backend import CpuAttention
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.attention.triton_backend import TritonAttention, Workspace
from meshlm.workers.attention.triton_latent import LatentWorkspace
from meshlm.workers.batch import UNKNOWN, CrossCache, StepInputs

if torch.cuda.is_available():
    pytest.skip("by the interpreter; tests/workers/cuda has the GPU", allow_module_level=True)

CPU, BLOCK, PAGES, ROWS = torch.device("cpu"), 4, 9, 6
LENGTH, CAPACITY = 21, 24


def cache(heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, CrossCache]:
    """A query's shape to come, and pages whose places behind the last hold NaN."""
    keys, values = (torch.randn(PAGES, CAPACITY, kv_heads, dim) for _ in range(2))
    keys[:, LENGTH:] = values[:, LENGTH:] = torch.nan
    return torch.empty(heads, dim), CrossCache(keys, values, 1, LENGTH)


def step_of(counts: list[int]) -> tuple[StepInputs, list[int]]:
    """Requests with so many tokens, decodes first, whose table of group 1 names one page in all its places; and the pages."""
    batch = batch_of([([1] * count, 0 if count > 1 else 6, [0, 1, 2]) for count in counts])
    pages = torch.randperm(PAGES)[: len(counts)]
    tables = (batch.block_tables[0], pages[:, None].expand(-1, 3).contiguous())
    return replace(batch, block_tables=tables), pages.tolist()


def expected(query: torch.Tensor, kept: CrossCache, counts: list[int], pages: list[int]) -> torch.Tensor:
    found, begin = [], 0
    for count, page in zip(counts, pages, strict=True):
        keys, values = (
            one[page, :LENGTH].repeat_interleave(query.shape[1] // one.shape[2], 1).double()
            for one in (kept.keys, kept.values)
        )
        scores = torch.einsum("thd,khd->thk", query[begin : begin + count].double(), keys) * 0.3
        found.append(torch.einsum("thk,khd->thd", scores.softmax(-1), values))
        begin += count
    return torch.cat(found).float()


@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 8)])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5], [1, 1, 4, 3]], ids=["decodes", "a prompt", "both"])
def test_all_backends_give_the_same(
    counts: list[int], heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "decode_tiles", lambda *_: (2, 16, 1, 1))  # else the GPU says
    torch.manual_seed(0)
    shape, kept = cache(*heads)
    batch, pages = step_of(counts)
    query = torch.randn(sum(counts), *shape.shape)
    right = expected(query, kept, counts, pages)
    torch.testing.assert_close(TorchAttention(batch, BLOCK).attend_cross(query, kept, 0.3), right)
    if library() is not None:
        torch.testing.assert_close(CpuAttention(batch, BLOCK).attend_cross(query, kept, 0.3), right)
    rows = torch.randperm(ROWS)[: len(counts)].int()
    by_row = torch.full((ROWS + 1, 3), PAGES - 1, dtype=torch.int32)
    by_row[rows.long()] = batch.block_tables[1].int()
    starts = torch.zeros(len(counts), dtype=torch.int32)
    ends = torch.tensor(counts).cumsum(0).int()
    tables = (by_row, by_row)
    known = replace(batch, columns=Columns(rows, starts, ends, len(counts), by_row), lens=None, block_tables=tables)
    for padding in (0, 2):  # a graph has room for more requests and tokens, of a row that is nobody's
        shown = known
        if padding:
            more = [torch.full((padding,), value, dtype=torch.int32) for value in (ROWS, 0, sum(counts))]
            wide = [torch.cat((one, two)) for one, two in zip((rows, starts, ends), more, strict=True)]
            padded = Columns(wide[0], wide[1], wide[2], len(counts) + padding, by_row)
            shown = replace(known, columns=padded, num_decodes=UNKNOWN)
        attention = TritonAttention(shown, BLOCK, Workspace(CPU, 4096), AuxStream(CPU), LatentWorkspace(CPU))
        lines = torch.cat((query, torch.zeros(padding, *shape.shape)))
        torch.testing.assert_close(attention.attend_cross(lines, kept, 0.3)[: len(query)], right, atol=1e-5, rtol=1e-4)
