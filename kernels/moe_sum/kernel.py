"""The sum over a token's experts:  out[t] = sum over j of weights[t, j] rows[positions[t, j]]

In float32, in the order of j; a negative position is not there. PARTS: rows are [k, m, n], all of them there.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit
def _weighted_sum(
    rows, positions, weights, out, columns,
    TOPK: tl.constexpr, WEIGHTED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOPK):
        if PARTS:
            position = (j * tl.num_programs(0) + token).to(tl.int64)
        else:
            position = tl.load(positions + token * TOPK + j).to(tl.int64)
        line = tl.load(rows + position * columns + at, mask=at < tl.where(position >= 0, columns, 0), other=0.0).to(
            tl.float32
        )
        if WEIGHTED:
            line *= tl.load(weights + token * TOPK + j)
        total += line
    tl.store(out + token.to(tl.int64) * columns + at, total.to(out.dtype.element_ty), mask=at < columns)


def sum_parts(parts: Tensor, out: Tensor) -> Tensor:
    """parts float32 [k, m, n] -> out [m, n]."""
    return _launch(parts, None, None, out, parts.shape[0])


def weighted_sum(rows: Tensor, positions: Tensor, weights: Tensor | None, out: Tensor) -> Tensor:
    """rows [r, n], positions int32 [m, k], weights float32 [m, k] or None (they are weighted), out [m, n], all dense."""
    return _launch(rows, positions, weights, out, positions.shape[1])


def _launch(rows: Tensor, positions: Tensor | None, weights: Tensor | None, out: Tensor, num_topk: int) -> Tensor:
    tokens, columns = out.shape
    block = min(1024, triton.next_power_of_2(columns))
    _weighted_sum[(tokens, triton.cdiv(columns, block))](
        rows, rows if positions is None else positions, rows if weights is None else weights, out, columns,
        TOPK=num_topk, PARTS=positions is None,
        WEIGHTED=weights is not None, BLOCK=block, num_warps=4, **pdl.options(out),
    )  # fmt: skip
    return out
