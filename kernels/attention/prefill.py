"""Attention of prompts and their chunks: a program for each tile of queries. The formula is kernel.py's.

A tile's keys of earlier steps come from their pages; those of its own step do too, or are read from the projection in one piece.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels.attention.kernel import CHUNKS_, PLAIN, Columns, Extras, first_seen, paged_tile
from meshlm.kernels.attention.tiles import (
    LARGE_DIM,
    USUAL_KEYS,
    hopper_from,
    prefill_tiles,
    tile_of_head,
    variant_of,
    verified,
)


@triton.jit
def _dense_tile(
    q, m, l, acc, first, last, nth_q, seen_from, step, before, kv, scale, cap, slope,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, SPAN: tl.constexpr, SLOPES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like paged_tile, for the keys of this step's own tokens first .. last - 1 of the request, which lie in one piece.

    nth_q, seen_from [M]: queries, and the first keys that they see, counted from the first of these tokens."""
    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        k = step.load([before + begin, (HEADS + kv) * DIM])
        s = tl.dot(q, k.T)
        factor = scale * 1.4426950408889634
        if CAP:
            s = cap * (2.0 * tl.sigmoid(2.0 * s * scale / cap) - 1.0)
            factor = 1.4426950408889634
        at = begin + tl.arange(0, BLOCK_N)
        if SLOPES:
            if not CAP:
                s = s * scale
            s += slope[:, None] * (at[None, :] - nth_q[:, None]).to(tl.float32)
            factor = 1.4426950408889634
        if MASK:
            seen = at[None, :] <= nth_q[:, None]
            if SPAN:
                seen = seen & (at[None, :] >= seen_from[:, None])
            # A row that sees nothing here sums nonsense, which its own key, in a later tile, fades to nothing.
            s = tl.where(seen, s * factor, -1.0e30)
            factor = 1.0
        top = tl.maximum(m, tl.max(s, axis=1) * factor)
        p = tl.exp2(s * factor - top[:, None])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(p, axis=1)
        v = step.load([before + begin, (HEADS + KV_HEADS + kv) * DIM])
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        m = top
    return m, l, acc


@triton.jit(do_not_specialize=["n", "skip", "fewest"])
def _prefill(
    query, step, keys, values, out, blocks, blocks_stride, rows, starts, ends, sinks, slopes, n, skip, fewest, scale, k_scale, v_scale,
    cap, size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    DENSE: tl.constexpr, SPAN: tl.constexpr, SLOPES: tl.constexpr, SEARCH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Late tiles of a prompt have the most keys: they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv = tl.program_id(0)
    low = skip - 1  # becomes the last request whose first tile is not after this one
    for base in range(skip, n, SEARCH):
        nth_request = base + tl.arange(0, SEARCH)
        begins = tl.load(ends + nth_request - 1, mask=(nth_request > 0) & (nth_request < n), other=0)
        fits = ((begins - skip) // BLOCK_Q + nth_request - skip <= tile) & (nth_request < n)
        low += tl.sum(fits.to(tl.int32), axis=0)
    before = tl.load(ends + low - 1, mask=low > 0, other=0)
    count = tl.load(ends + low) - before
    nth = (tile - ((before - skip) // BLOCK_Q + low - skip)) * BLOCK_Q
    if (nth < 0) | (nth >= count) | (count < fewest):
        return
    start = tl.load(starts + low)
    table = blocks + tl.load(rows + low).to(tl.int64) * blocks_stride
    m_at = tl.arange(0, BLOCK_Q * GROUP)
    nth_q = nth + m_at // GROUP
    head = kv * (HEADS // KV_HEADS) + m_at % GROUP
    real = (nth_q < count) & (m_at % GROUP < HEADS // KV_HEADS)
    d = tl.arange(0, BLOCK_D)
    where = ((before + nth_q).to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    inside = real[:, None] & (d < DIM)[None, :]
    q = tl.load(query + where, mask=inside, other=0.0)
    query_at = start + nth_q
    seen_from = query_at  # with a SPAN alone it says something
    if SPAN:
        seen_from = first_seen(query_at, size, SPAN)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head, mask=real, other=0.0)
    if SINKS:
        m = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full((BLOCK_Q * GROUP,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_Q * GROUP,), tl.float32)
    acc = tl.zeros((BLOCK_Q * GROUP, BLOCK_D), tl.float32)
    last = tl.minimum(start + nth + BLOCK_Q, start + count)
    if DENSE:
        last = start
    whole = tl.minimum(start + nth + 1, last) // BLOCK_N * BLOCK_N  # keys below are seen by every query of the tile
    first = 0
    oldest = 0
    if SPAN:
        oldest = tl.maximum(0, first_seen(start + nth, size, SPAN))
        first = tl.minimum(last, oldest // BLOCK_N * BLOCK_N)
        newest = tl.maximum(0, first_seen(start + nth + BLOCK_Q - 1, size, SPAN))
        edge = tl.minimum(whole, tl.cdiv(newest, BLOCK_N) * BLOCK_N)
        edge = tl.maximum(first, edge)
        m, l, acc = paged_tile(
            q, m, l, acc, first, edge, query_at, seen_from, table, keys, values, kv, scale * k_scale, cap, slope, oldest,
            PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP, SPAN, SLOPES,
        )  # fmt: skip
        first = edge
    m, l, acc = paged_tile(
        q, m, l, acc, first, whole, query_at, seen_from, table, keys, values, kv, scale * k_scale, cap, slope, oldest,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP, SPAN, SLOPES,
    )  # fmt: skip
    m, l, acc = paged_tile(
        q, m, l, acc, tl.maximum(first, whole), last, query_at, seen_from, table, keys, values, kv, scale * k_scale, cap, slope, oldest,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP, SPAN, SLOPES,
    )  # fmt: skip
    acc = acc * v_scale
    if DENSE:
        whole = (nth + 1) // BLOCK_N * BLOCK_N
        first = 0
        if SPAN == CHUNKS_:  # tiles begin with the chunk, unless some queries are in the next one
            first = tl.maximum(0, oldest - start)
            whole = first + (nth + 1 - first) // BLOCK_N * BLOCK_N
            whole = tl.where(newest > oldest, first, whole)
        elif SPAN:
            first = tl.maximum(0, oldest - start) // BLOCK_N * BLOCK_N
            whole = first
        m, l, acc = _dense_tile(
            q, m, l, acc, first, whole, nth_q, seen_from - start, step, before, kv, scale, cap, slope,
            HEADS, KV_HEADS, DIM, BLOCK_N, False, CAP, SPAN, SLOPES, STAGES,
        )  # fmt: skip
        m, l, acc = _dense_tile(
            q, m, l, acc, whole, tl.minimum(nth + BLOCK_Q, count), nth_q, seen_from - start, step, before, kv, scale, cap, slope,
            HEADS, KV_HEADS, DIM, BLOCK_N, True, CAP, SPAN, SLOPES, STAGES,
        )  # fmt: skip
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=inside)


def dense(dim: int, device: torch.device) -> bool:
    """Whether `prefill` reads a step's own keys and values from the projection: tiles by bulk copies (TMA) on Hopper and later."""
    if not 16 <= dim <= LARGE_DIM or dim & (dim - 1):  # a bulk copy has no more columns
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, at: Columns, scale: float, out: Tensor, skip: int = 0,
    extras: Extras = PLAIN, *, qkv: Tensor | None = None, fewest: int = 1, num_pairs: int | None = None,
    tiles: tuple[int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """query, out [t, heads, d] of requests skip .. n - 1 of the columns; keys, values [blocks, page, kv_heads, d].

    The first `skip` requests have one token each and are left out (see `decode`), and so are all with fewer than `fewest` tokens.
    qkv [t, (heads + 2 kv_heads) d]: the projection with its keys rotated (kernels/rope_cache). With it the keys and values of this
    step's tokens are read there, in one piece, and only those of earlier steps from their pages. num_pairs: of prompt tokens and the
    keys that each sees, where they are known: with many, hopper.py does it all."""
    tokens, heads, dim = query.shape
    pays = (num_pairs if num_pairs is not None else tokens * USUAL_KEYS) * heads >= hopper_from(dim, extras.window)
    if (
        pays
        and not extras.chunk
        and extras.slopes is None
        and qkv is not None
        and tiles is None
        and variant_of(query, keys, extras) in verified
    ):
        from meshlm.kernels.attention import hopper  # its dialect takes long to import, and is not in every Triton

        hopper.prefill(query, keys, values, at, scale, out, skip, extras, qkv=qkv, fewest=fewest)
        return
    _, page, kv_heads, _ = keys.shape
    group = triton.next_power_of_2(heads // kv_heads)
    from_step = qkv is not None and dense(dim, query.device)
    rows, block_n, warps, stages = tiles or tile_of_head(prefill_tiles(tokens * group * kv_heads), dim)
    block_q = max(1, rows // group)
    step: Tensor | TensorDescriptor = query  # not read
    if qkv is not None and from_step:
        step = TensorDescriptor(qkv, list(qkv.shape), [qkv.stride(0), 1], [block_n, dim])
    sinks, slopes = (query if of_heads is None else of_heads for of_heads in (extras.sinks, extras.slopes))
    _prefill[(kv_heads, (tokens - skip) // block_q + at.n - skip)](
        query, step, keys, values, out, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        sinks, slopes, at.n, skip, fewest, scale, extras.k_scale, extras.v_scale, extras.cap, extras.chunk or extras.window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, GROUP=group, BLOCK_Q=block_q, BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(dim), CAP=extras.cap > 0, SINKS=extras.sinks is not None, DENSE=from_step,
        SPAN=extras.span, SLOPES=extras.slopes is not None, SEARCH=256, STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
