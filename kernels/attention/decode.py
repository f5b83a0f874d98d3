"""Attention of requests with one new token: SPLITS programs share each context (Dao et al. 2023, "Flash-Decoding").

The last program to arrive combines their parts. The grid does not depend on the lengths, as CUDA graphs need. The formula is
kernel.py's.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import fp8, pdl
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras, paged_tile
from meshlm.kernels.fp8 import within


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
        m, l, acc = paged_tile(
            q, m, l, acc, first, whole, query_at, table, keys, values, kv, scale, cap, window,
            PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP, WINDOW,
        )  # fmt: skip
    m, l, acc = paged_tile(
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
