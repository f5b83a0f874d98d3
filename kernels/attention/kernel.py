"""Attention over the paged cache, for any mix of prompts, chunks and decodes.

    out = softmax(q k^T scale [soft cap] + mask) v        (Vaswani et al. 2017, section 3.2.1)

by tiles with running maximum and sum (Dao et al. 2022, algorithm 1). The query heads of a kv head are packed into the rows of one
tile, so keys and values are read once for all of them. `prefill` gives each tile of queries a program; `decode` splits each context
among SPLITS programs and combines their parts in a second kernel (Dao et al. 2023, "Flash-Decoding"): a grid that does not depend
on the lengths, as CUDA graphs need.

Requests are columns as in kernels/step_input: rows, starts, ends. Masks: causal, and with `window` > 0 only the last `window` keys.
Soft cap: cap tanh(s / cap). Sinks: one more logit per head that takes part in the sum only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels import fp8, pdl
from meshlm.kernels.attention.tiles import prefill_tiles
from meshlm.kernels.fp8 import within


@triton.jit
def _tile(
    q, m, l, acc, first, last, query_at, table, keys, values, kv, scale, cap, window,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
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
            if WINDOW:
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


@triton.jit
def _dense_tile(
    q, m, l, acc, first, last, nth_q, step, before, kv, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like _tile, for the keys of this step's own tokens first .. last - 1 of the request, which lie in one piece."""
    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        k = step.load([before + begin, (HEADS + kv) * DIM])
        s = tl.dot(q, k.T)
        factor = scale * 1.4426950408889634
        if CAP:
            s = cap * (2.0 * tl.sigmoid(2.0 * s * scale / cap) - 1.0)
            factor = 1.4426950408889634
        if MASK:
            at = begin + tl.arange(0, BLOCK_N)
            seen = at[None, :] <= nth_q[:, None]
            if WINDOW:
                seen = seen & (at[None, :] > nth_q[:, None] - window)
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
    query, step, keys, values, out, blocks, blocks_stride, rows, starts, ends, sinks, n, skip, fewest, scale, k_scale, v_scale,
    cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    DENSE: tl.constexpr, WINDOW: tl.constexpr, SEARCH: tl.constexpr, STAGES: tl.constexpr,
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
    if WINDOW:
        first = tl.minimum(last, tl.maximum(0, start + nth - window + 1) // BLOCK_N * BLOCK_N)
        edge = tl.minimum(whole, tl.cdiv(tl.maximum(0, start + nth + BLOCK_Q - window), BLOCK_N) * BLOCK_N)
        edge = tl.maximum(first, edge)
        m, l, acc = _tile(
            q, m, l, acc, first, edge, query_at, table, keys, values, kv, scale * k_scale, cap, window,
            PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP, WINDOW,
        )  # fmt: skip
        first = edge
    m, l, acc = _tile(
        q, m, l, acc, first, whole, query_at, table, keys, values, kv, scale * k_scale, cap, window,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP, WINDOW,
    )  # fmt: skip
    m, l, acc = _tile(
        q, m, l, acc, tl.maximum(first, whole), last, query_at, table, keys, values, kv, scale * k_scale, cap, window,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP, WINDOW,
    )  # fmt: skip
    acc = acc * v_scale
    if DENSE:
        whole = (nth + 1) // BLOCK_N * BLOCK_N
        first = 0
        if WINDOW:
            first = tl.maximum(0, nth - window + 1) // BLOCK_N * BLOCK_N
            whole = first
        m, l, acc = _dense_tile(
            q, m, l, acc, first, whole, nth_q, step, before, kv, scale, cap, window,
            HEADS, KV_HEADS, DIM, BLOCK_N, False, CAP, WINDOW, STAGES,
        )  # fmt: skip
        m, l, acc = _dense_tile(
            q, m, l, acc, whole, tl.minimum(nth + BLOCK_Q, count), nth_q, step, before, kv, scale, cap, window,
            HEADS, KV_HEADS, DIM, BLOCK_N, True, CAP, WINDOW, STAGES,
        )  # fmt: skip
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(line, weight, angles, at, partner, inside, turned, DIM, half, eps, NORM: tl.constexpr):
    """Heads [g, d]: `line` [g, 1] points at their first elements; normed (if asked) and rotated, in float32."""
    own = tl.load(line + at[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
    if NORM:
        dtype = weight.dtype.element_ty
        inverse = tl.rsqrt(tl.sum(own * own, axis=1) / DIM + eps)[:, None]
        w = tl.load(weight + at, mask=at < DIM, other=0.0).to(tl.float32)
        w_other = tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32)
        own = (own * inverse * w[None, :]).to(dtype).to(tl.float32)
        other = (other * inverse * w_other[None, :]).to(dtype).to(tl.float32)
    angle = tl.where(at < half, at, at - half)
    cos = tl.load(angles + angle, mask=turned, other=1.0)
    sin = tl.load(angles + half + angle, mask=turned, other=0.0) * tl.where(at < half, -1.0, 1.0)
    return own * cos[None, :] + tl.where(turned[None, :], other * sin[None, :], 0.0)


@triton.jit
def _decode(
    query, keys, values, out, parts, sums, counters, blocks, blocks_stride, rows, starts, ends, sinks, scale, k_scale, v_scale,
    cap, window, rope, q_weight, k_weight, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROPE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv, split = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2)
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    if count != 1:
        return  # padding, or a prompt in a step of both
    start = tl.load(starts + request)
    length = start + 1
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, length - window)
    tiles = tl.cdiv(length, BLOCK_N) - begin // BLOCK_N
    each = tl.cdiv(tiles, SPLITS)
    used = tl.cdiv(tiles, each)  # splits that have keys
    if split >= used:
        return
    first = (begin // BLOCK_N + split * each) * BLOCK_N
    last = tl.minimum(length, first + each * BLOCK_N)
    table = blocks + tl.load(rows + request).to(tl.int64) * blocks_stride
    real_group: tl.constexpr = HEADS // KV_HEADS
    m_at = tl.arange(0, GROUP)
    head = kv * real_group + m_at
    real = m_at < real_group
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    line = before.to(tl.int64) * HEADS + head  # of the token; it is token `before` of the step
    if ROPE:  # `query` is the whole qkv row: rotate its heads, and let one split bring the new key and value
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(d < half, d + half, d - half)
        turned = d < ROTARY
        angles = rope + start.to(tl.int64) * ROTARY
        qkv = query + before.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
        q = _rotated(
            qkv + head[:, None] * DIM, q_weight, angles, d, partner, inside, turned, DIM, half, eps, NORM
        ).to(query.dtype.element_ty)  # fmt: skip
        if split == used - 1:
            page = tl.load(table + start // PAGE).to(tl.int64)
            to = ((page * PAGE + start % PAGE) * KV_HEADS + kv) * DIM + d
            only = (m_at == 0)[:, None] & (d < DIM)[None, :]
            k_line = qkv + (HEADS + kv + m_at * 0)[:, None] * DIM
            key = _rotated(k_line, k_weight, angles, d, partner, only, turned, DIM, half, eps, NORM)
            value = tl.load(qkv + (HEADS + KV_HEADS + kv) * DIM + d, mask=d < DIM).to(tl.float32)
            if FP8:
                key = within(key, k_scale)
                value = within(value, v_scale)
            tl.store(keys + to[None, :] + (m_at * 0)[:, None], key.to(keys.dtype.element_ty), mask=only)
            tl.store(values + to, value.to(values.dtype.element_ty), mask=d < DIM)
            tl.debug_barrier()
    else:
        q = tl.load(query + line[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    m = tl.full((GROUP,), float("-inf"), tl.float32)
    l = tl.zeros((GROUP,), tl.float32)
    if SINKS:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
        if split == 0:
            m = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * 1.4426950408889634
            l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
    query_at = tl.zeros((GROUP,), tl.int32) + start
    whole = first
    if not WINDOW:
        whole = first + (last - first) // BLOCK_N * BLOCK_N
        m, l, acc = _tile(
            q, m, l, acc, first, whole, query_at, table, keys, values, kv, scale, cap, window,
            PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP, WINDOW,
        )  # fmt: skip
    m, l, acc = _tile(
        q, m, l, acc, whole, last, query_at, table, keys, values, kv, scale, cap, window,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP, WINDOW,
    )  # fmt: skip
    if SPLITS == 1:
        acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + line[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
        return
    if used == 1:
        acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + line[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
        return
    place = (request.to(tl.int64) * HEADS + head) * SPLITS + split
    tl.store(parts + place[:, None] * DIM + d[None, :], acc, mask=inside)
    tl.store(sums + place * 2, m, mask=real)
    tl.store(sums + place * 2 + 1, l, mask=real)
    tl.debug_barrier()
    done = tl.atomic_add(counters + request * KV_HEADS + kv, 1, sem="acq_rel")
    if done == used - 1:  # the last to arrive combines, and leaves the counter as it was
        tl.store(counters + request * KV_HEADS + kv, 0)
        s = tl.arange(0, SPLITS)
        there = s < used
        for nth in tl.static_range(real_group):
            base = (request.to(tl.int64) * HEADS + kv * real_group + nth) * SPLITS
            m_s = tl.load(sums + (base + s) * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            l_s = tl.load(sums + (base + s) * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            weight = tl.where(there, tl.exp2(m_s - tl.max(m_s, axis=0)), 0.0)
            part = tl.load(
                parts + (base + s)[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            result = tl.sum(part * weight[:, None], axis=0) * (v_scale / tl.sum(l_s * weight, axis=0))
            tl.store(
                out + (before.to(tl.int64) * HEADS + kv * real_group + nth) * DIM + d,
                result.to(out.dtype.element_ty),
                mask=d < DIM,
            )


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


def dense(dim: int, device: torch.device) -> bool:
    """Whether `prefill` reads a step's own keys and values from the projection: tiles by bulk copies (TMA) on Hopper and later."""
    if dim < 16 or dim & (dim - 1):
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


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
    qkv: Tensor | None = None,
    fewest: int = 1,
    tiles: tuple[int, int, int, int] | None = None,
) -> None:
    """query, out [t, heads, d] of requests skip .. n - 1 of the columns; keys, values [blocks, page, kv_heads, d].

    The first `skip` requests have one token each and are left out (see `decode`), and so are all with fewer than `fewest` tokens.
    qkv [t, (heads + 2 kv_heads) d]: the projection with its keys rotated (kernels/rope_cache). With it the keys and values of this
    step's tokens are read there, in one piece, and only those of earlier steps from their pages.
    """
    tokens, heads, dim = query.shape
    _, page, kv_heads, _ = keys.shape
    group = triton.next_power_of_2(heads // kv_heads)
    from_step = qkv is not None and dense(dim, query.device)
    rows, block_n, warps, stages = tiles or prefill_tiles(tokens * group * kv_heads)
    block_q = max(1, rows // group)
    step: Tensor | TensorDescriptor = query  # not read
    if qkv is not None and from_step:
        step = TensorDescriptor(qkv, list(qkv.shape), [qkv.stride(0), 1], [block_n, dim])
    _prefill[(kv_heads, (tokens - skip) // block_q + at.n - skip)](
        query, step, keys, values, out, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        query if extras.sinks is None else extras.sinks, at.n, skip, fewest, scale, extras.k_scale, extras.v_scale,
        extras.cap, extras.window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, GROUP=group, BLOCK_Q=block_q, BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(dim), CAP=extras.cap > 0, SINKS=extras.sinks is not None, DENSE=from_step,
        WINDOW=extras.window > 0, SEARCH=256, STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip


class Rope:
    """What a decode needs to rotate query and key itself: table float32 [max_len, rotary], weights of the head norms."""

    __slots__ = ("eps", "norms", "num_heads", "table")

    def __init__(self, table: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, num_heads: int) -> None:
        self.table, self.norms, self.eps, self.num_heads = table, norms, eps, num_heads


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Columns,
    scale: float,
    out: Tensor,
    workspace: tuple[Tensor, Tensor, Tensor],
    splits: int,
    extras: Extras = PLAIN,
    rope: Rope | None = None,
    *,
    block_n: int = 32,
    warps: int = 2,
    stages: int = 2,
) -> None:
    """Those of the first n requests of the columns that have one token: query, out [>= n, heads, d].

    With `rope`, query is the projection qkv [>= n, (heads + 2 kv_heads) d] as it is: heads are normed and rotated here, and the
    new keys and values are written to the cache, divided by the scales of `extras` if that is FP8. splits is a power of two.
    workspace: float32 with room for [n, heads, splits, d] and [n, heads, splits, 2], int32 zeros [n, kv_heads] (left zero).
    """
    _, page, kv_heads, dim = keys.shape
    heads = rope.num_heads if rope is not None else query.shape[1]
    parts, sums, counters = workspace
    table = rope.table if rope is not None else sums
    norms = rope.norms if rope is not None and rope.norms is not None else (query, query)
    _decode[(kv_heads, splits, at.n)](
        query, keys, values, out, parts, sums, counters, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        query if extras.sinks is None else extras.sinks, scale * extras.k_scale,
        extras.k_scale, extras.v_scale, extras.cap, extras.window, table, *norms, rope.eps if rope is not None else 0.0,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_N=block_n, BLOCK_D=triton.next_power_of_2(dim), SPLITS=splits, CAP=extras.cap > 0,
        SINKS=extras.sinks is not None, WINDOW=extras.window > 0, ROPE=rope is not None,
        ROTARY=table.shape[-1] if rope is not None else 0,
        NORM=rope is not None and rope.norms is not None, FP8=keys.dtype == fp8.DTYPE, PDL=pdl.supported(),
        num_warps=warps, num_stages=stages,
        **({"launch_pdl": True} if pdl.supported() else {}),
    )  # fmt: skip
