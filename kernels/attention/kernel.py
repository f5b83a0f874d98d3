"""Attention over the paged cache, for any mix of prompts, chunks and decodes.

    out = softmax(q k^T scale [soft cap] + mask) v        (Vaswani et al. 2017, section 3.2.1)

by tiles with running maximum and sum (Dao et al. 2022, algorithm 1). The query heads of a kv head are packed into the rows of one
tile, so keys and values are read once for all of them. `prefill` gives each tile of queries a program; `decode` splits each context
among SPLITS programs and combines their parts in a second kernel (Dao et al. 2023, "Flash-Decoding"): a grid that does not depend
on the lengths, as CUDA graphs need.

Requests are columns as in kernels/step_input: rows, starts, ends. Masks: causal, and with `window` > 0 only the last `window` keys.
Soft cap: cap tanh(s / cap). Sinks: one more logit per head that takes part in the sum only.
"""

import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


@triton.jit
def _tile(
    q, m, l, acc, first, last, query_at, table, keys, values, kv, scale, cap, window,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Tiles of keys [first, last) for one tile of queries at positions query_at [M]; scores are in powers of two."""
    d = tl.arange(0, BLOCK_D)
    for begin in range(first, last, BLOCK_N):
        at = begin + tl.arange(0, BLOCK_N)
        page = tl.load(table + at // PAGE, mask=at < last, other=0).to(tl.int64)
        line = ((page * PAGE + at % PAGE) * KV_HEADS + kv) * DIM
        if MASK:
            inside = (at < last)[:, None] & (d < DIM)[None, :]
            k = tl.load(keys + line[:, None] + d[None, :], mask=inside, other=0.0).to(q.dtype)
        else:
            k = tl.load(keys + line[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(k)) * scale
        if CAP:
            s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0)
        s = s * 1.4426950408889634
        if MASK:
            seen = (at[None, :] <= query_at[:, None]) & (at < last)[None, :]
            if window > 0:
                seen = seen & (at[None, :] > query_at[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        l = l * fade + tl.sum(p, axis=1)
        if MASK:
            v = tl.load(values + line[:, None] + d[None, :], mask=inside, other=0.0).to(q.dtype)
        else:
            v = tl.load(values + line[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None])
        m = top
    return m, l, acc


@triton.jit(do_not_specialize=["n", "skip"])
def _prefill(
    query, keys, values, out, blocks, blocks_stride, rows, starts, ends, sinks, n, skip, scale, v_scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    # Late tiles of a prompt have the most keys: they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv = tl.program_id(0)
    low, high = skip, n - 1  # the last request whose first tile is not after this one
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        before = tl.load(ends + middle - 1, mask=middle > 0, other=0)
        fits = ((before - skip) // BLOCK_Q + middle - skip) <= tile
        low = tl.where((low < high) & fits, middle, low)
        high = tl.where((low < high) & ~fits, middle - 1, high)
    before = tl.load(ends + low - 1, mask=low > 0, other=0)
    count = tl.load(ends + low) - before
    nth = (tile - ((before - skip) // BLOCK_Q + low - skip)) * BLOCK_Q
    if (nth < 0) | (nth >= count):
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
    if SINKS:
        m = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full((BLOCK_Q * GROUP,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_Q * GROUP,), tl.float32)
    acc = tl.zeros((BLOCK_Q * GROUP, BLOCK_D), tl.float32)
    last = tl.minimum(start + nth + BLOCK_Q, start + count)
    whole = (start + nth + 1) // BLOCK_N * BLOCK_N  # keys below are seen by every query of the tile
    first = 0
    if window > 0:
        first = tl.maximum(0, start + nth - window + 1) // BLOCK_N * BLOCK_N
        edge = tl.minimum(whole, tl.cdiv(tl.maximum(0, last - window), BLOCK_N) * BLOCK_N)
        edge = tl.maximum(first, edge)
        m, l, acc = _tile(
            q, m, l, acc, first, edge, query_at, table, keys, values, kv, scale, cap, window,
            PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP,
        )  # fmt: skip
        first = edge
    m, l, acc = _tile(
        q, m, l, acc, first, whole, query_at, table, keys, values, kv, scale, cap, window,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP,
    )  # fmt: skip
    m, l, acc = _tile(
        q, m, l, acc, tl.maximum(first, whole), last, query_at, table, keys, values, kv, scale, cap, window,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP,
    )  # fmt: skip
    acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    query, keys, values, out, parts, sums, blocks, blocks_stride, rows, starts, ends, sinks, scale, v_scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    kv, split = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2)
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    if count == 0:
        return  # padding
    start = tl.load(starts + request)
    length = start + 1
    begin = 0
    if window > 0:
        begin = tl.maximum(0, length - window)
    tiles = tl.cdiv(length, BLOCK_N) - begin // BLOCK_N
    each = tl.cdiv(tiles, SPLITS)
    first = (begin // BLOCK_N + split * each) * BLOCK_N
    last = tl.minimum(length, first + each * BLOCK_N)
    table = blocks + tl.load(rows + request).to(tl.int64) * blocks_stride
    m_at = tl.arange(0, GROUP)
    head = kv * (HEADS // KV_HEADS) + m_at
    real = m_at < HEADS // KV_HEADS
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    line = request.to(tl.int64) * HEADS + head
    m = tl.full((GROUP,), float("-inf"), tl.float32)
    l = tl.zeros((GROUP,), tl.float32)
    if SINKS:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
        if split == 0:
            m = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * 1.4426950408889634
            l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
    query_at = tl.zeros((GROUP,), tl.int32) + start
    if first < last:
        q = tl.load(query + line[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        if window > 0:
            m, l, acc = _tile(
                q, m, l, acc, first, last, query_at, table, keys, values, kv, scale, cap, window,
                PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP,
            )  # fmt: skip
        else:
            whole = first + (last - first) // BLOCK_N * BLOCK_N
            m, l, acc = _tile(
                q, m, l, acc, first, whole, query_at, table, keys, values, kv, scale, cap, window,
                PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP,
            )  # fmt: skip
            m, l, acc = _tile(
                q, m, l, acc, whole, last, query_at, table, keys, values, kv, scale, cap, window,
                PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP,
            )  # fmt: skip
    if SPLITS == 1:
        acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + line[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        place = line * SPLITS + split
        tl.store(parts + place[:, None] * DIM + d[None, :], acc, mask=inside)
        tl.store(sums + place * 2, m, mask=real)
        tl.store(sums + place * 2 + 1, l, mask=real)


@triton.jit
def _combine(
    parts, sums, out, ends, v_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    if tl.load(ends + request) == before:
        return
    line = (request.to(tl.int64) * HEADS + head) * SPLITS
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    m = tl.load(sums + (line + s) * 2)
    weight = tl.exp2(m - tl.max(m, axis=0))
    l = tl.sum(tl.load(sums + (line + s) * 2 + 1) * weight, axis=0)
    part = tl.load(parts + (line + s)[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], axis=0) * (v_scale / l)
    tl.store(out + line // SPLITS * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


class Columns:
    """The requests of a step on the device (kernels/step_input), and their block tables int32 [rows, stride]."""

    __slots__ = ("blocks", "ends", "n", "rows", "starts")

    def __init__(self, rows: Tensor, starts: Tensor, ends: Tensor, n: int, blocks: Tensor) -> None:
        self.rows, self.starts, self.ends, self.n, self.blocks = rows, starts, ends, n, blocks


class Extras:
    """What few models have: window of keys, soft cap of scores, sink logits [heads], scales of an FP8 cache."""

    __slots__ = ("cap", "k_scale", "sinks", "v_scale", "window")

    def __init__(
        self,
        window: int = 0,
        cap: float = 0.0,
        sinks: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        self.window, self.cap, self.sinks = window, cap, sinks
        self.k_scale, self.v_scale = k_scale, v_scale


PLAIN = Extras()


def prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Columns,
    scale: float,
    out: Tensor,
    skip: int = 0,
    extras: Extras = PLAIN,
    *,
    block_q: int = 0,
    block_n: int = 64,
    warps: int = 8,
    stages: int = 3,
) -> None:
    """query, out [t, heads, d] of requests skip .. n - 1 of the columns; keys, values [blocks, page, kv_heads, d].

    The first `skip` requests have one token each and are left out (see `decode`).
    """
    tokens, heads, dim = query.shape
    _, page, kv_heads, _ = keys.shape
    group = triton.next_power_of_2(heads // kv_heads)
    block_q = block_q or max(1, 128 // group)
    tiles = (tokens - skip) // block_q + at.n - skip
    _prefill[(kv_heads, tiles)](
        query, keys, values, out, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        query if extras.sinks is None else extras.sinks, at.n, skip, scale * extras.k_scale, extras.v_scale,
        extras.cap, extras.window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, GROUP=group, BLOCK_Q=block_q, BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(dim), CAP=extras.cap > 0, SINKS=extras.sinks is not None, STEPS=11,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Columns,
    scale: float,
    out: Tensor,
    workspace: tuple[Tensor, Tensor],
    splits: int,
    extras: Extras = PLAIN,
    *,
    block_n: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """One token for each of the first n requests of the columns: query, out [>= n, heads, d].

    workspace: float32 with room for [n, heads, splits, d] and [n, heads, splits, 2]; splits is a power of two.
    """
    _, heads, dim = query.shape
    _, page, kv_heads, _ = keys.shape
    parts, sums = workspace
    wide = triton.next_power_of_2(dim)
    _decode[(kv_heads, splits, at.n)](
        query, keys, values, out, parts, sums, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        query if extras.sinks is None else extras.sinks, scale * extras.k_scale, extras.v_scale,
        extras.cap, extras.window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_N=block_n, BLOCK_D=wide, SPLITS=splits, CAP=extras.cap > 0, SINKS=extras.sinks is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _combine[(at.n, heads)](
            parts, sums, out, at.ends, extras.v_scale,
            HEADS=heads, DIM=dim, BLOCK_D=wide, SPLITS=splits, num_warps=2,
        )  # fmt: skip
