"""The record of the embedding. Tables of Qwen3-0.6B and Llama-3.1-8B."""

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.embedding import reference
from meshlm.kernels.embedding.kernel import embed
from meshlm.kernels.norm.kernel import rms_norm
from meshlm.kernels.op import Launch, Op


def _make(dtype: torch.dtype, device: torch.device, rows: int, columns: int, tokens: int, first: int = 0) -> Launch:
    """first: of a rank's rows; ids of other ranks give zeros."""
    table, norm = (
        torch.randn(rows, columns, device=device).to(dtype),
        (torch.rand(columns, device=device).to(dtype) + 0.5, 1e-6),
    )
    ids, edges = (
        torch.randint(first + rows, (tokens,), device=device),
        [0, first, first + rows - 1, *[first + rows] * bool(first)],
    )
    ids[: len(edges)] = torch.tensor(edges, device=device)[:tokens]

    def run() -> list[Tensor | None]:
        return [embed(ids, table, None, first)[0], *embed(ids, table, norm, first)]

    def expected() -> list[Tensor | None]:
        rows_of_ids, normed = reference.embed(ids, table, norm, first)
        return [rows_of_ids, rows_of_ids, normed]

    beside = {
        "torch_then_norm": lambda: rms_norm(F.embedding(ids, table), *norm),
        "torch_gather": lambda: F.embedding(ids, table),
    }
    return Launch(run, expected, 3 * tokens * columns * table.element_size(), beside=beside)


OPS = (
    Op(
        "embed", _make, exact=2,
        cases=[(*shape, 6, first) for shape in ((11, 64), (7, 1000), (3, 129)) for first in (0, 4)],
        of_models=[(*table, tokens) for table, tokens in product(((151936, 1024), (128256, 4096)), (1, 16, 64, 256, 2048, 8192))],
    ),
)  # fmt: skip
