"""Rows of the embedding table, and the first layer's RMSNorm of them.

    out[t] = table[ids[t] - first]                                   (zero where this rank does not have the row)
    normed[t] = out[t] / sqrt(mean(out[t]^2) + eps) * weight         (NORM; Zhang and Sennrich 2019, eq. 4)

One program a token: the row is read once and stays in registers for the norm, whose statistics are float32.

send: one token's row goes as packets to all ranks, whose sum kernels/gemv receives in the first product; see there why that is safe.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import packets, pdl
from meshlm.kernels.gemv.kernel import Turn

SENT = 512  # words by one program


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

    The table's rows are those of ids from `first` on; other ids give zeros (vocabulary-parallel ranks add theirs up)."""
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


@triton.jit(do_not_specialize=["nth", "first"])
def _send(
    ids, table, inboxes, turns, nth, first, rows,
    RANK: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """table: words of two columns."""
    pdl.follow(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WORDS
    row = tl.load(ids).to(tl.int64) - first
    here = (row >= 0) & (row < rows)
    line = tl.where(here, tl.load(table + tl.where(here, row, 0) * WORDS + at, mask=inside, other=0), 0)
    turn = tl.load(turns) + nth
    places = (((turn & 1) * SIZE + RANK) * STRIDE + at).to(tl.int64) * 8
    for peer in tl.static_range(SIZE):
        packets.send(tl.load(inboxes + peer) + places, line, turn, inside)


def send(ids: Tensor, table: Tensor, first: int, turn: Turn) -> Tensor:
    """ids int [1], table [rows, n] bfloat16, of ids from `first` on: an empty [1, n] that stands for the sum on its way."""
    workspace = turn.workspace
    rows, columns = table.shape
    assert table.dtype == torch.bfloat16 and columns == workspace.columns and ids.shape == (1,)  # noqa: PT018
    words = columns // 2
    _send[(triton.cdiv(words, SENT),)](
        ids, table.view(torch.int32), workspace.packets, workspace.turns, turn.nth, first, rows,
        RANK=workspace.rank, SIZE=workspace.size, STRIDE=workspace.rows * words, WORDS=words, BLOCK=SENT,
        num_warps=4, **pdl.options(table),
    )  # fmt: skip
    return torch.empty(1, columns, dtype=table.dtype, device=table.device)
