"""Attention of requests with a few new tokens each, drafts that a step verifies: each context is read once for all of them.

A tile's lines are queries x query heads of one kv head, as many as there are: with four query heads for a kv head, four tokens fill the
tile of 16 lines that a plain decode (decode.py) has for one. Contexts are shared by SPLITS programs as there; a second kernel combines
what they found, since lines are too many for one program to do so in no time. Neither grids nor code depend on how many tokens a
request has, which the device alone may know: any mix of them replays in one CUDA graph. The formula is kernel.py's; keys and values of
all tokens are in the cache already.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.decode import AHEAD, ask_for
from meshlm.kernels.attention.kernel import EVERYTHING, PLAIN, Columns, Extras, first_seen, paged_tile
from meshlm.kernels.attention.tiles import VerifyTile

COMBINED = 1 << 12  # numbers of parts that a program combines


@triton.jit
def _shares(request, starts, ends, size, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr):
    """First token of the step, tokens, position of the first, first key that it sees, tiles of a split, splits that have keys."""
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    start = tl.load(starts + request)
    begin = 0
    if SPAN:
        begin = tl.maximum(0, first_seen(start, size, SPAN))
    tiles = tl.cdiv(start + tl.maximum(count, 1), BLOCK_N) - begin // BLOCK_N
    each = tl.cdiv(tiles, SPLITS)
    return before, count, start, begin, each, tl.cdiv(tiles, each)


@triton.jit
def _verify(
    query, keys, values, out, parts, sums, blocks, blocks_stride, rows, starts, ends, sinks, slopes, scale, v_scale, cap, size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPAN: tl.constexpr, FREE: tl.constexpr,
    SLOPES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group: tl.constexpr = HEADS // KV_HEADS
    kv, tile = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    split, request = tl.program_id(1), tl.program_id(2)
    before, count, start, begin, each, used = _shares(request, starts, ends, size, BLOCK_N, SPLITS, SPAN)
    table = blocks + tl.load(rows + request).to(tl.int64) * blocks_stride
    first = (begin // BLOCK_N + split * each) * BLOCK_N
    last = tl.minimum(start + count, first + each * BLOCK_N)
    mine = (tile * LINES < count * group) & (split < used)  # padding has no tokens, and few tokens no second tile
    if AHEAD:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
        if mine:
            ask_for(keys, values, table, kv, first, last, PAGE, KV_HEADS, DIM, BLOCK_D, AHEAD)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not mine:
        return
    nth, d = tile * LINES + tl.arange(0, LINES), tl.arange(0, BLOCK_D)
    real, head = nth < count * group, kv * group + nth % group
    line = (before + nth // group).to(tl.int64) * HEADS + head  # of query, out and parts
    inside = real[:, None] & (d < DIM)[None, :]
    q = tl.load(query + line[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    query_at = start + nth // group
    seen_from = query_at  # with a SPAN alone it says something
    if SPAN:
        seen_from = first_seen(query_at, size, SPAN)
    m = tl.full((LINES,), float("-inf"), tl.float32)
    l = tl.zeros((LINES,), tl.float32)
    if SINKS:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
        if split == 0:
            m = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * 1.4426950408889634
            l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((LINES, BLOCK_D), tl.float32)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head, mask=real, other=0.0)
    whole = first
    if FREE:  # keys up to the first query's own are seen by all
        whole = tl.maximum(first, tl.minimum(last, start + 1) // BLOCK_N * BLOCK_N)
        m, l, acc = paged_tile(
            q, m, l, acc, first, whole, query_at, seen_from, table, keys, values, kv, scale, cap, slope, begin,
            PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP, SPAN, SLOPES,
        )  # fmt: skip
    m, l, acc = paged_tile(
        q, m, l, acc, whole, last, query_at, seen_from, table, keys, values, kv, scale, cap, slope, begin,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP, SPAN, SLOPES,
    )  # fmt: skip
    if SPLITS == 1 or used == 1:
        acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + line[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
        return
    place = line * SPLITS + split
    tl.store(parts + place[:, None] * DIM + d[None, :], acc, mask=inside)
    tl.store(sums + place * 2, m, mask=real)
    tl.store(sums + place * 2 + 1, l, mask=real)


@triton.jit
def _combine(
    out, parts, sums, starts, ends, v_scale, size,
    HEADS: tl.constexpr, DIM: tl.constexpr, LINES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LINES lines of a request, tokens x heads: what the splits found of each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(1)
    before, count, _, _, _, used = _shares(request, starts, ends, size, BLOCK_N, SPLITS, SPAN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (tl.program_id(0) * LINES >= count * HEADS) | (used == 1):
        return
    nth, s, d = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    real, line = nth < count * HEADS, before.to(tl.int64) * HEADS + nth
    there, place = real[:, None] & (s < used)[None, :], line[:, None] * SPLITS + s[None, :]
    m = tl.load(sums + place * 2, mask=there, other=float("-inf"))
    l = tl.load(sums + place * 2 + 1, mask=there, other=0.0)
    inside = there[:, :, None] & (d < DIM)[None, None, :]
    part = tl.load(parts + place[:, :, None] * DIM + d[None, None, :], mask=inside, other=0.0)
    weights = tl.exp2(m - tl.where(real, tl.max(m, axis=1), 0.0)[:, None])
    total = tl.where(real, tl.sum(l * weights, axis=1), 1.0)
    result = tl.sum(part * weights[:, :, None], axis=1) * (v_scale / total)[:, None]
    inside_out = real[:, None] & (d < DIM)[None, :]
    tl.store(out + line[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=inside_out)


def verify(
    query: Tensor, keys: Tensor, values: Tensor, at: Columns, scale: float, out: Tensor, workspace: tuple[Tensor, Tensor],
    queries: int, tile: VerifyTile, extras: Extras = PLAIN,
) -> None:  # fmt: skip
    """Attention of the first n requests of the columns, which have 0 .. `queries` tokens each: query, out [>= tokens, heads, d].

    What these tokens leave in keys, values [blocks, page, kv_heads, d] is there. workspace: float32 with room for [tokens, heads,
    splits, d] and [tokens, heads, splits, 2]."""
    _, page, kv_heads, dim = keys.shape
    heads, block_d = query.shape[1], triton.next_power_of_2(dim)
    sinks, slopes = (query if of_heads is None else of_heads for of_heads in (extras.sinks, extras.slopes))
    size = extras.chunk or extras.window
    _verify[(kv_heads * tile.of(queries, heads // kv_heads), tile.splits, at.n)](
        query, keys, values, out, *workspace, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        sinks, slopes, scale * extras.k_scale, extras.v_scale, extras.cap, size,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, LINES=tile.lines, BLOCK_N=tile.block_n, BLOCK_D=block_d,
        SPLITS=tile.splits, CAP=extras.cap > 0, SINKS=extras.sinks is not None, SPAN=extras.span, FREE=extras.span == EVERYTHING,
        SLOPES=extras.slopes is not None, AHEAD=AHEAD if query.is_cuda else 0,
        num_warps=tile.warps, num_stages=tile.stages, **pdl.options(query),
    )  # fmt: skip
    if tile.splits > 1:
        lines = max(1, COMBINED // (tile.splits * block_d))
        _combine[(-(-queries * heads // lines), at.n)](
            out, *workspace, at.starts, at.ends, extras.v_scale, size,
            HEADS=heads, DIM=dim, LINES=lines, BLOCK_N=tile.block_n, BLOCK_D=block_d, SPLITS=tile.splits, SPAN=extras.span,
            num_warps=4, **pdl.options(query),
        )  # fmt: skip
