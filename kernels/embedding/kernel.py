"""Rows of the embedding table, and the first layer's RMSNorm of them.

    out[t] = table[ids[t] - first]                                   (zero where this rank does not have the row)
    normed[t] = out[t] / sqrt(mean(out[t]^2) + eps) * weight         (NORM; Zhang and Sennrich 2019, eq. 4)

One program a token: the row is read once and stays in registers for the norm, whose statistics are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(
    ids, table, weight, out, normed, first, rows, columns, eps, NORM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    row = tl.load(ids + token).to(tl.int64) - first
    here = (row >= 0) & (row < rows)
    line = tl.load(table + tl.where(here, row, 0) * columns + at, mask=inside, other=0.0)
    line = tl.where(here, line, 0.0).to(table.dtype.element_ty)
    tl.store(out + token * columns + at, line, mask=inside)
    if NORM:
        x = line.to(tl.float32)
        scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, axis=0) / columns + eps)
        tl.store(normed + token * columns + at, (x * inverse * scale).to(normed.dtype.element_ty), mask=inside)


def embed(
    ids: Tensor, table: Tensor, norm: tuple[Tensor, float] | None = None, first: int = 0
) -> tuple[Tensor, Tensor | None]:
    """ids int [t], table [rows, n] -> [t, n], and with `norm` (weight [n], eps) the norm of it [t, n].

    The table's rows are those of ids from `first` on; other ids give zeros (vocabulary-parallel ranks add theirs up).
    """
    tokens = ids.shape[0]
    rows, columns = table.shape
    out = torch.empty(tokens, columns, dtype=table.dtype, device=table.device)
    weight, eps = norm if norm is not None else (table, 0.0)
    normed = torch.empty_like(out) if norm is not None else None
    block = triton.next_power_of_2(columns)
    _embed[(tokens,)](
        ids, table, weight, out, out if normed is None else normed, first, rows, columns, eps,
        NORM=norm is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out, normed
