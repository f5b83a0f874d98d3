"""The record of the sum over a token's experts; some rows are not there. Sizes of Qwen3-30B-A3B."""

import torch
from torch import Tensor

from meshlm.kernels.moe_sum import reference
from meshlm.kernels.moe_sum.kernel import weighted_sum
from meshlm.kernels.op import Launch, Op


def _make(
    dtype: torch.dtype, device: torch.device, rows: int, columns: int, topk: int = 8, weighted: bool = True
) -> Launch:
    values = torch.randn(max(40, rows * topk), columns, device=device).to(dtype)
    positions = torch.randint(-1, len(values), (rows, topk), dtype=torch.int32, device=device)
    weights = torch.rand(rows, topk, device=device) if weighted else None
    out = torch.empty(rows, columns, device=device, dtype=dtype)

    def expected() -> Tensor:
        return reference.weighted_sum(values, positions, weights, dtype)

    moved = (topk + 1) * out.nbytes
    return Launch(lambda: weighted_sum(values, positions, weights, out), expected, moved)


SHAPES = [(1, 64), (3, 1000), (17, 2056)]
OPS = (
    Op(
        "weighted_sum", _make, [(*shape, 3, weighted) for shape in SHAPES for weighted in (False, True)],
        [(rows, 2048) for rows in (1, 16, 64, 256, 2048, 8192)], near=2,
    ),
)  # fmt: skip
