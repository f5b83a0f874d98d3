"""Attention of requests with one new token: SPLITS programs share each context (Dao et al. 2023, "Flash-Decoding").

The last program to arrive combines their parts. The grid does not depend on the lengths, as CUDA graphs need. The formula is
kernel.py's.

What was there before this step (columns, block tables, rotations, earlier keys and values) is read, or asked for, before the wait
for the kernel before this one (kernels/pdl.py); what this step computes, behind it.

With a shared prefix (shared_prefix.py) a request's own keys begin behind it: its first parts are there already, its own stand behind.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import float8, pdl
from meshlm.kernels.attention.kernel import (
    CHUNKS,
    EVERYTHING,
    PLAIN,
    Columns,
    Extras,
    SharedPrefixes,
    first_seen,
    paged_tile,
)
from meshlm.kernels.fp8 import within

AHEAD = 64  # tokens whose keys and values are asked for before the query is there
COMBINED = 128  # numbers of parts that a thread holds while it combines them


@triton.jit
def _rotated(line, weight, other_weight, cos, sin, at, partner, inside, turned, DIM, eps, NORM: tl.constexpr):
    """Heads [g, d]: `line` [g, 1] points at their first elements; normed (if asked) and rotated, in float32."""
    own = tl.load(line + at[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
    if NORM:
        dtype = line.dtype.element_ty
        inverse = tl.rsqrt(tl.sum(own * own, axis=1) / DIM + eps)[:, None]
        own = (own * inverse * weight[None, :]).to(dtype).to(tl.float32)
        other = (other * inverse * other_weight[None, :]).to(dtype).to(tl.float32)
    return own * cos[None, :] + tl.where(turned[None, :], other * sin[None, :], 0.0)


@triton.jit
def ask_for(
    keys, values, table, kv, first, last,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Have the keys and values of tokens first .. first + AHEAD - 1 (but none from `last` on) brought to the L2 cache."""
    LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)  # elements of what memory sends at once
    LINES: tl.constexpr = (BLOCK_D + LINE - 1) // LINE
    at = tl.minimum(first + tl.arange(0, AHEAD), last - 1)
    page = tl.load(table + at // PAGE).to(tl.int64)
    begin = ((page * PAGE + at % PAGE) * KV_HEADS + kv) * DIM
    place = begin[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, DIM - 1)[None, :]
    ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(ask, "=r,l", [keys + place], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(ask, "=r,l", [values + place], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _combine(
    parts, sums, out, base, used, heads, v_scale,
    DIM: tl.constexpr, LINES: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The attention of one kv head's query heads, of their first `used` parts: AT_ONCE parts of all heads are asked for together, since
    each wait for memory is longer than all arithmetic here. base: the place of the first head's first part."""
    g, s, d = tl.arange(0, LINES), tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    head = base + g * SPLITS
    known = (g < heads)[:, None] & (s < used)[None, :]
    top = tl.max(
        tl.load(sums + (head[:, None] + s[None, :]) * 2, mask=known, other=float("-inf"), cache_modifier=".cg"), axis=1
    )
    top = tl.where(g < heads, top, 0.0)[:, None]
    total = tl.zeros((LINES,), tl.float32)
    result = tl.zeros((LINES, BLOCK_D), tl.float32)
    for begin in range(0, used, AT_ONCE):
        nth = begin + tl.arange(0, AT_ONCE)
        there = (g < heads)[:, None] & (nth < used)[None, :]
        place = head[:, None] + nth[None, :]
        m = tl.load(sums + place * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        l = tl.load(sums + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(
            parts + place[:, :, None] * DIM + d[None, None, :], mask=there[:, :, None] & (d < DIM)[None, None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        weight = tl.exp2(m - top)
        total += tl.sum(l * weight, axis=1)
        result += tl.sum(part * weight[:, :, None], axis=1)
    result *= (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(
        out + g[:, None] * DIM + d[None, :],
        result.to(out.dtype.element_ty),
        mask=(g < heads)[:, None] & (d < DIM)[None, :],
    )


@triton.jit
def _decode(
    query, keys, values, out, parts, sums, counters, blocks, blocks_stride, rows, starts, ends, sinks, slopes, scale, k_scale, v_scale,
    cap, size, rope, q_weight, k_weight, eps, shared_tokens, shared_parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    LINES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    SPAN: tl.constexpr, FREE: tl.constexpr, SLOPES: tl.constexpr,
    ROPE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr, AT_ONCE: tl.constexpr,
    SHARED: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    start = tl.load(starts + request)
    table = blocks + tl.load(rows + request).to(tl.int64) * blocks_stride
    length = start + 1
    begin = 0
    if SPAN:
        begin = tl.maximum(0, first_seen(start, size, SPAN))
    before_own = 0  # parts that shared_prefix.py has left
    if SHARED:
        begin = tl.load(shared_tokens + request)
        before_own = tl.load(shared_parts + request)
    tiles = tl.cdiv(length, BLOCK_N) - begin // BLOCK_N
    each = tl.cdiv(tiles, SPLITS)
    used = tl.cdiv(tiles, each)  # splits that have keys
    first = (begin // BLOCK_N + split * each) * BLOCK_N
    last = tl.minimum(length, first + each * BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mine = (count == 1) & (split < used)  # not padding, nor a prompt in a step of both
    if AHEAD:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
        if mine:
            ask_for(keys, values, table, kv, first, last, PAGE, KV_HEADS, DIM, BLOCK_D, AHEAD)
    if ROPE:
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(d < half, d + half, d - half)
        turned = d < ROTARY
        angle = rope + start.to(tl.int64) * ROTARY + tl.where(d < half, d, d - half)
        cos = tl.load(angle, mask=turned, other=1.0)
        sin = tl.load(angle + half, mask=turned, other=0.0) * tl.where(d < half, -1.0, 1.0)
        q_w, q_other, k_w, k_other = cos, cos, cos, cos
        if NORM:
            q_w = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
            q_other = tl.load(q_weight + partner, mask=turned, other=0.0).to(tl.float32)
            k_w = tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
            k_other = tl.load(k_weight + partner, mask=turned, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not mine:
        return
    # The tile has more lines than there are query heads: each head has `EACH` equal ones, of which the first counts.
    real_group: tl.constexpr = HEADS // KV_HEADS
    EACH: tl.constexpr = GROUP // LINES
    m_at = tl.arange(0, GROUP)
    head = kv * real_group + m_at // EACH
    real = (m_at // EACH < real_group) & (m_at % EACH == 0)
    inside = real[:, None] & (d < DIM)[None, :]
    line = before.to(tl.int64) * HEADS + head  # of the token; it is token `before` of the step
    if ROPE:  # `query` is the whole qkv row: rotate its heads, and let one split bring the new key and value
        qkv = query + before.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
        group = tl.arange(0, LINES)
        full = (group < real_group)[:, None] & (d < DIM)[None, :]
        q_line = qkv + (kv * real_group + group)[:, None] * DIM
        q = _rotated(q_line, q_w, q_other, cos, sin, d, partner, full, turned, DIM, eps, NORM)
        q = tl.broadcast_to(q.to(query.dtype.element_ty)[:, None, :], (LINES, EACH, BLOCK_D)).reshape(GROUP, BLOCK_D)
        if split == used - 1:
            page = tl.load(table + start // PAGE).to(tl.int64)
            to = ((page * PAGE + start % PAGE) * KV_HEADS + kv) * DIM + d
            k_line = qkv + (HEADS + kv + tl.arange(0, 1))[:, None] * DIM
            key = _rotated(k_line, k_w, k_other, cos, sin, d, partner, (d < DIM)[None, :], turned, DIM, eps, NORM)
            value = tl.load(qkv + (HEADS + KV_HEADS + kv) * DIM + d, mask=d < DIM).to(tl.float32)
            if FP8 > 0:
                key = within(key, k_scale, FP8)
                value = within(value, v_scale, FP8)
            tl.store(keys + to[None, :], key.to(keys.dtype.element_ty), mask=(d < DIM)[None, :])
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
    seen_from = tl.zeros((GROUP,), tl.int32) + begin
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes + head, mask=real, other=0.0)
    whole = first
    if FREE:  # all tiles but the last are seen whole
        whole = first + (last - first) // BLOCK_N * BLOCK_N
        m, l, acc = paged_tile(
            q, m, l, acc, first, whole, query_at, seen_from, table, keys, values, kv, scale, cap, slope, begin,
            PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP, SPAN, SLOPES,
        )  # fmt: skip
    m, l, acc = paged_tile(
        q, m, l, acc, whole, last, query_at, seen_from, table, keys, values, kv, scale, cap, slope, begin,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, True, CAP, SPAN, SLOPES,
    )  # fmt: skip
    if SPLITS == 1 and not SHARED:
        acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + line[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
        return
    alone = used == 1
    if SHARED:
        alone = alone & (before_own == 0)
    if alone:
        acc = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
        tl.store(out + line[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
        return
    place = (request.to(tl.int64) * HEADS + head) * SLOTS + before_own + split
    tl.store(parts + place[:, None] * DIM + d[None, :], acc, mask=inside)
    tl.store(sums + place * 2, m, mask=real)
    tl.store(sums + place * 2 + 1, l, mask=real)
    tl.debug_barrier()
    done = 0
    if SPLITS > 1:
        done = tl.atomic_add(counters + request * KV_HEADS + kv, 1, sem="acq_rel")
    if done == used - 1:  # the last to arrive combines, and leaves the counter as it was
        if SPLITS > 1:
            tl.store(counters + request * KV_HEADS + kv, 0)
        first_head = before.to(tl.int64) * HEADS + kv * real_group
        _combine(
            parts, sums, out + first_head * DIM, (request.to(tl.int64) * HEADS + kv * real_group) * SLOTS, before_own + used,
            real_group, v_scale, DIM, LINES, BLOCK_D, SLOTS, AT_ONCE,
        )  # fmt: skip


class Rope:
    """The data by which a decode rotates query and key itself: table float32 [max_len, rotary], weights of the head norms."""

    __slots__ = ("eps", "norms", "num_heads", "table")

    def __init__(self, table: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, num_heads: int) -> None:
        self.table, self.norms, self.eps, self.num_heads = table, norms, eps, num_heads


def decode(
    query: Tensor, keys: Tensor, values: Tensor, at: Columns, scale: float, out: Tensor,
    workspace: tuple[Tensor, Tensor, Tensor], splits: int, extras: Extras = PLAIN, rope: Rope | None = None,
    shared: SharedPrefixes | None = None, *, block_n: int = 32, warps: int = 2, stages: int = 2,
) -> None:  # fmt: skip
    """Attention of those of the first n requests of the columns that have one token: query, out [>= n, heads, d].

    With `rope`, query is the projection qkv [>= n, (heads + 2 kv_heads) d] as it is: heads are normed and rotated here, and the
    new keys and values are written to the cache, divided by the scales of `extras` if that is FP8. splits is a power of two.
    workspace: float32 with room for [n, heads, slots, d] and [n, heads, slots, 2], int32 zeros [n, kv_heads] (left zero); slots:
    splits, or with `shared` those of `shared.slots`, of which shared_prefix.py has filled the first ones."""
    _, page, kv_heads, dim = keys.shape
    heads = rope.num_heads if rope is not None else query.shape[1]
    lines, block_d = triton.next_power_of_2(heads // kv_heads), triton.next_power_of_2(dim)
    slots = splits if shared is None else shared.slots(splits)
    at_once = min(slots, max(1, COMBINED * 32 * warps // (lines * block_d)))
    is_free = extras.span == EVERYTHING or (extras.span == CHUNKS and extras.chunk % block_n == 0)
    parts, sums, counters = workspace
    table = rope.table if rope is not None else sums
    norms = rope.norms if rope is not None and rope.norms is not None else (query, query)
    sinks, slopes = (query if of_heads is None else of_heads for of_heads in (extras.sinks, extras.slopes))
    _decode[(kv_heads, splits, at.n)](
        query, keys, values, out, parts, sums, counters, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        sinks, slopes, scale * extras.k_scale, extras.k_scale, extras.v_scale, extras.cap, extras.chunk or extras.window,
        table, *norms, rope.eps if rope is not None else 0.0,
        None if shared is None else shared.tokens, None if shared is None else shared.parts,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, GROUP=max(16, lines), LINES=lines,
        BLOCK_N=block_n, BLOCK_D=block_d, SPLITS=splits, CAP=extras.cap > 0,
        SINKS=extras.sinks is not None, SPAN=extras.span, FREE=is_free, SLOPES=extras.slopes is not None, ROPE=rope is not None,
        ROTARY=table.shape[-1] if rope is not None else 0,
        NORM=rope is not None and rope.norms is not None, FP8=float8.largest(keys.dtype),
        AHEAD=AHEAD if query.is_cuda else 0, AT_ONCE=at_once, SHARED=shared is not None, SLOTS=slots,
        num_warps=warps, num_stages=stages, **pdl.options(query),
    )  # fmt: skip
