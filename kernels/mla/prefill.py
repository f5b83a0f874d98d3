"""Absorbed attention of prompts and their chunks over the paged cache: a program for each tile of queries x heads. kernel.py's formula.

It needs nothing that is projected up, so it serves any mix of requests in a CUDA graph, and the earlier chunks of a prompt (`context`).
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.mla.kernel import latent_tile
from meshlm.kernels.mla.tiles import PrefillTile, prefill_tile


@triton.jit
def tile_of(tile, n, skip, ends, BLOCK_Q: tl.constexpr, SEARCH: tl.constexpr):
    """The request of this tile of queries, its first token in the step, its tokens, and the tile's first one among them."""
    low = skip - 1  # becomes the last request whose first tile is not after this one
    for base in range(skip, n, SEARCH):
        nth = base + tl.arange(0, SEARCH)
        begins = tl.load(ends + nth - 1, mask=(nth > 0) & (nth < n), other=0)
        fits = ((begins - skip) // BLOCK_Q + nth - skip <= tile) & (nth < n)
        low += tl.sum(fits.to(tl.int32), axis=0)
    before = tl.load(ends + low - 1, mask=low > 0, other=0)
    count = tl.load(ends + low) - before
    return low, before, count, (tile - ((before - skip) // BLOCK_Q + low - skip)) * BLOCK_Q


@triton.jit(do_not_specialize=["n", "skip", "fewest"])
def _prefill(
    absorbed, query, query_stride, cache, out, sums, blocks, blocks_stride, rows, starts, ends, n, skip, fewest, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    CONTEXT: tl.constexpr, SEARCH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Late tiles of a prompt have the most keys: they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    low, before, count, nth = tile_of(tile, n, skip, ends, BLOCK_Q, SEARCH)
    if (nth < 0) | (nth >= count) | (count < fewest):
        return
    start = tl.load(starts + low)
    table = blocks + tl.load(rows + low).to(tl.int64) * blocks_stride
    m_at, r, p = tl.arange(0, BLOCK_Q * BLOCK_H), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    h, nth_q = tl.program_id(0) * BLOCK_H + m_at % BLOCK_H, nth + m_at // BLOCK_H
    real = (nth_q < count) & (h < HEADS)
    token = (before + nth_q).to(tl.int64)
    where = ((token * HEADS + h) * RANK)[:, None] + r[None, :]
    inside = real[:, None] & (r < RANK)[None, :]
    q = tl.load(absorbed + where, mask=inside, other=0.0)
    rotated = (token * query_stride + h * (NOPE + ROTARY) + NOPE)[:, None] + p[None, :]
    q_rope = tl.load(query + rotated, mask=real[:, None] & (p < ROTARY)[None, :], other=0.0)
    m = tl.full((BLOCK_Q * BLOCK_H,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q * BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_Q * BLOCK_H, BLOCK_R), tl.float32)
    query_at = start + nth_q
    if CONTEXT:
        last = start
        whole = start // BLOCK_N * BLOCK_N
    else:
        last = tl.minimum(start + nth + BLOCK_Q, start + count)
        whole = (start + nth + 1) // BLOCK_N * BLOCK_N  # lines below are seen by every query of the tile
    m, l, acc = latent_tile(
        q, q_rope, m, l, acc, 0, whole, query_at, table, cache, scale,
        PAGE, RANK + ROTARY, RANK, ROTARY, BLOCK_N, BLOCK_R, BLOCK_P, False, STAGES,
    )  # fmt: skip
    m, l, acc = latent_tile(
        q, q_rope, m, l, acc, whole, last, query_at, table, cache, scale,
        PAGE, RANK + ROTARY, RANK, ROTARY, BLOCK_N, BLOCK_R, BLOCK_P, True, 1,
    )  # fmt: skip
    some = tl.where(l == 0.0, 1.0, l)
    tl.store(out + where, (acc / some[:, None]).to(out.dtype.element_ty), mask=inside)
    if CONTEXT:
        tl.store(sums + token * HEADS + h, m + tl.log2(some), mask=real)


def prefill(
    absorbed: Tensor, query: Tensor, cache: Tensor, at: Columns, scale: float, out: Tensor, skip: int = 0,
    fewest: int = 1, *, context: Tensor | None = None, tile: PrefillTile | None = None,
) -> None:  # fmt: skip
    """absorbed, out [t, heads, rank], contiguous; query [t, heads, nope + rotary] gives the rotated part; cache [blocks, page, width].

    The first `skip` requests have one token each and are left out (see decode.py), and so are all with fewer than `fewest` tokens.
    context: only lines of earlier steps count, and this float32 [t, heads] gets the logarithms (of base 2) of the sums."""
    tokens, heads, rank = absorbed.shape
    rotary = cache.shape[2] - rank
    tile = tile or prefill_tile()
    block_h = min(tile.rows, triton.next_power_of_2(heads))
    block_q = tile.rows // block_h
    _prefill[(-(-heads // block_h), (tokens - skip) // block_q + at.n - skip)](
        absorbed, query, query.stride(0), cache, out, absorbed if context is None else context,
        at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends, at.n, skip, fewest, scale,
        HEADS=heads, NOPE=query.shape[2] - rotary, RANK=rank, ROTARY=rotary, PAGE=cache.shape[1], BLOCK_Q=block_q,
        BLOCK_H=block_h, BLOCK_N=tile.block_n, BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_P=max(16, triton.next_power_of_2(rotary)), CONTEXT=context is not None, SEARCH=256, STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
