"""Attention of prompts on Hopper's own instructions, in Triton's Gluon dialect. The formula is kernel.py's, the reference prefill.py.

A program has 128 rows (queries x query heads of a kv head). A warp each brings tiles of keys and of values (bulk_copies.py); two
groups of four warps multiply (wgmma), 64 rows each, and take the scores of the next tile while the softmax of this one is computed
(Shah et al. 2024, "FlashAttention-3").
"""

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from meshlm.kernels.attention.bulk_copies import LAYOUT, SWIZZLED, WIDE, WIDE_, place, producer, together
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras
from meshlm.kernels.attention.tiles import HOPPER_ROWS

KEYS = 128  # of a tile, and half as many where a head has more than 128 numbers
LEAST_PAGE = 8  # tokens of a bulk copy: so many lines are swizzled together

SCORES_OF = {keys: gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16]) for keys in (KEYS, KEYS // 2)}
SCORES_LARGE, SCORES_SMALL = gl.constexpr(SCORES_OF[KEYS]), gl.constexpr(SCORES_OF[KEYS // 2])
OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]), 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of queries, by a group of four warps


@gluon.jit
def _scores(q_buffer, k_buffer, which, stage, PARTS: gl.constexpr, KEYS: gl.constexpr):
    """Starts q k^T of a tile."""
    s = gl.zeros([64, KEYS], gl.float32, SCORES_LARGE if KEYS == 128 else SCORES_SMALL)
    for part in gl.static_range(PARTS):
        s = warpgroup_mma(
            q_buffer.index(which * PARTS + part), k_buffer.index(stage * PARTS + part).permute([1, 0]), s,
            use_acc=part > 0, is_async=True,
        )  # fmt: skip
    return s


@gluon.jit
def _softmax(
    s, m, l, of_context, nth, start, query_at, scale, cap, window,
    MASK: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The weights of a tile's scores, what fades the sums so far, and the new maxima and sums."""
    factor = scale * 1.4426950408889634
    if CAP:
        s = cap * (2.0 / (1.0 + gl.exp2(s * (-2.0 * 1.4426950408889634 * scale / cap))) - 1.0)
        factor = 1.4426950408889634
    if MASK:
        at = gl.where(of_context, nth, start + nth) + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        limit = gl.where(of_context, start - 1, query_at)
        seen = at[None, :] <= limit[:, None]
        if WINDOW:
            seen = seen & (at[None, :] > (query_at - window)[:, None])
        # A row that sees nothing here sums nonsense, which its first real key fades to nothing; each row sees its own key.
        s = gl.where(seen, s * factor, -1.0e30)
        factor = 1.0
    top = gl.maximum(m, gl.max(s, axis=1) * factor)
    p = gl.exp2(s * factor - top[:, None])
    fade = gl.exp2(m - top)
    return p, fade, top, l * fade + gl.sum(p, axis=1)


@gluon.jit
def _weigh(weights, v_buffer, stage, sums, PARTS: gl.constexpr):
    """Starts adding the weighed values of a tile."""
    more = ()
    for part in gl.static_range(PARTS):
        more = more + (warpgroup_mma(weights, v_buffer.index(stage * PARTS + part), sums[part], is_async=True),)  # type: ignore[assignment]
    return more


@gluon.jit
def _weighed(sums, PARTS: gl.constexpr):
    """The sums, when they are done."""
    if PARTS == 1:
        return (warpgroup_mma_wait(0, deps=[sums[0]]),)
    else:
        return warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def _turn(
    tile, weights, sums, m, l, which, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, start, query_at,
    num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
    PARTS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of a tile, while the values of the tile before are weighed and summed."""
    stage = tile % STAGES
    old, old_turn = (tile - 1) % STAGES, ((tile - 1) // STAGES) & 1
    of_context, nth = tile < 0, tile
    if MASK:
        of_context, nth = place(tile, num_masked, context_masked, masked_of_context, own_masked, num_context, KEYS)
    s = _scores(q_buffer, k_buffer, which, stage, PARTS, KEYS)
    mbarrier.wait(v_full.index(old), old_turn)
    sums = _weigh(weights, v_buffer, old, sums, PARTS)
    s = warpgroup_mma_wait(PARTS, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    p, fade, m, l = _softmax(s, m, l, of_context, nth, start, query_at, scale, cap, window, MASK, CAP, WINDOW)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, OUT))
    # The next keys are awaited here, so that the compiler does not wait for the values' sums before the softmax.
    mbarrier.wait(k_full.index((tile + 1) % STAGES), ((tile + 1) // STAGES) & 1, pred=tile + 1 < total)
    sums = _weighed(sums, PARTS)
    mbarrier.arrive(v_free.index(old))
    faded = ()
    for part in gl.static_range(PARTS):
        faded = faded + (sums[part] * fade[:, None],)  # type: ignore[assignment]
    return gl.convert_layout(p.to(weights.dtype), WEIGHTS), faded, m, l


@gluon.jit
def _consumer(
    which, query, out, sinks, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, before, count, start, nth, kv,
    num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_Q: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    CAP: gl.constexpr, SINKS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HEADS // KV_HEADS
    PARTS: gl.constexpr = (DIM + WIDE_ - 1) // WIDE_
    row = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    nth_q = nth + row // GROUP
    real = (row < BLOCK_Q * GROUP) & (nth_q < count)
    line = ((before + nth_q).to(gl.int64) * HEADS + kv * GROUP + row % GROUP) * DIM
    c = gl.arange(0, WIDE_, gl.SliceLayout(0, LINES))
    for part in gl.static_range(PARTS):
        inside = real[:, None] & (part * WIDE_ + c < DIM)[None, :]
        some = gl.load(query + line[:, None] + (part * WIDE_ + c)[None, :], mask=inside, other=0.0)
        q_buffer.index(which * PARTS + part).store(some)
    fence_async_shared()
    together()
    SCORES: gl.constexpr = SCORES_LARGE if KEYS == 128 else SCORES_SMALL
    s_row = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_at = start + nth + s_row // GROUP
    if SINKS:
        sink = gl.load(sinks + kv * GROUP + s_row % GROUP)
        m = sink.to(gl.float32) * 1.4426950408889634
        l = gl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([64, WIDE_], gl.float32, OUT),)  # type: ignore[assignment]
    of_context, first = place(0, num_masked, context_masked, masked_of_context, own_masked, num_context, KEYS)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q_buffer, k_buffer, which, 0, PARTS, KEYS)])
    mbarrier.arrive(k_free.index(0))
    p, _, m, l = _softmax(s, m, l, of_context, first, start, query_at, scale, cap, window, True, CAP, WINDOW)
    weights = gl.convert_layout(p.to(query.dtype.element_ty), WEIGHTS)
    mbarrier.wait(k_full.index(1 % STAGES), (1 // STAGES) & 1, pred=total > 1)
    for tile in range(1, num_masked):
        weights, sums, m, l = _turn(
            tile, weights, sums, m, l, which, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, start, query_at,
            num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
            PARTS, KEYS, STAGES, True, CAP, WINDOW,
        )  # fmt: skip
    for tile in range(num_masked, total):
        weights, sums, m, l = _turn(
            tile, weights, sums, m, l, which, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, start, query_at,
            num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
            PARTS, KEYS, STAGES, False, CAP, WINDOW,
        )  # fmt: skip
    old, old_turn = (total - 1) % STAGES, ((total - 1) // STAGES) & 1
    mbarrier.wait(v_full.index(old), old_turn)
    sums = _weighed(_weigh(weights, v_buffer, old, sums, PARTS), PARTS)
    inverse = gl.convert_layout(1.0 / gl.where(l == 0.0, 1.0, l), gl.SliceLayout(1, OUT))
    for part in gl.static_range(PARTS):
        inside = real[:, None] & (part * WIDE_ + c < DIM)[None, :]
        found = gl.convert_layout((sums[part] * inverse[:, None]).to(out.dtype.element_ty), LINES)
        gl.store(out + line[:, None] + (part * WIDE_ + c)[None, :], found, mask=inside)


@gluon.jit(do_not_specialize=["n", "skip", "fewest", "row_limit", "window", "blocks_stride"])
def _prefill(
    key_pages, value_pages, step, query, keys, values, out, blocks, blocks_stride, rows, starts, ends, sinks, n, skip, fewest,
    row_limit, scale, cap, window,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, SHARES: gl.constexpr, BLOCK_Q: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, WINDOW: gl.constexpr, SEARCH: gl.constexpr,
):  # fmt: skip
    # Late tiles of a prompt have the most keys: they go first. Tiles of one kv head run together, so its keys stay in the L2 cache.
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    kv = gl.program_id(1)
    low = skip - 1  # becomes the last request whose first tile is not after this one
    for base in range(skip, n, SEARCH):
        nth_request = base + gl.arange(0, SEARCH, gl.BlockedLayout([1], [32], [4], [0]))
        begins = gl.load(ends + nth_request - 1, mask=(nth_request > 0) & (nth_request < n), other=0)
        fits = ((begins - skip) // BLOCK_Q + nth_request - skip <= tile) & (nth_request < n)
        low += gl.sum(fits.to(gl.int32), axis=0)
    before = gl.load(ends + low - 1, mask=low > 0, other=0)
    count = gl.load(ends + low) - before
    nth = (tile - ((before - skip) // BLOCK_Q + low - skip)) * BLOCK_Q
    if (nth < 0) | (nth >= count) | (count < fewest):
        return
    start = gl.load(starts + low)
    table = blocks + gl.load(rows + low).to(gl.int64) * blocks_stride
    oldest = 0
    own_end = (gl.minimum(nth + BLOCK_Q, count) + KEYS - 1) // KEYS
    if WINDOW:  # all tiles have a mask
        oldest = gl.maximum(0, start + nth - window + 1)
        context_end = (start + KEYS - 1) // KEYS
        context_masked = gl.minimum(context_end, oldest // KEYS)
        masked_of_context = context_end - context_masked
        own_masked = gl.maximum(0, nth - window + 1) // KEYS
        num_context = 0
        num_masked = masked_of_context + own_end - own_masked
        total = num_masked
    else:  # those that some query of the tile does not see whole
        num_context = start // KEYS
        context_masked = num_context
        masked_of_context = (start % KEYS > 0).to(gl.int32)
        own_masked = nth // KEYS
        num_masked = masked_of_context + own_end - own_masked
        total = num_masked + num_context + own_masked
    PARTS: gl.constexpr = (DIM + WIDE_ - 1) // WIDE_
    q_buffer = gl.allocate_shared_memory(query.dtype.element_ty, [2 * PARTS, 64, WIDE_], SWIZZLED)
    k_buffer = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES * PARTS, KEYS, WIDE_], SWIZZLED)
    v_buffer = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES * PARTS, KEYS, WIDE_], SWIZZLED)
    # By stage: keys, values are there; both groups are done with them.
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    together()
    gl.warp_specialize(
        [
            (_consumer, (
                0, query, out, sinks, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, before, count, start, nth, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
                HEADS, KV_HEADS, DIM, BLOCK_Q, KEYS, STAGES, CAP, SINKS, WINDOW,
            )),
            (_consumer, (
                1, query, out, sinks, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, before, count, start, nth, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
                HEADS, KV_HEADS, DIM, BLOCK_Q, KEYS, STAGES, CAP, SINKS, WINDOW,
            )),
            (producer, (
                key_pages, keys, step, k_buffer, k_full, k_free, False, row_limit, table, start, oldest, before, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total,
                HEADS, KV_HEADS, DIM, PAGE, SHARES, KEYS, STAGES,
            )),
            (producer, (
                value_pages, values, step, v_buffer, v_full, v_free, True, row_limit, table, start, oldest, before, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total,
                HEADS, KV_HEADS, DIM, PAGE, SHARES, KEYS, STAGES,
            )),
        ],
        [4, 1, 1],
        [224, 56, 56],
    )  # fmt: skip


def keys_of(dim: int) -> int:
    """Keys of a tile for heads of so many numbers: registers hold their scores and the sums of values."""
    return KEYS if dim <= 2 * WIDE else KEYS // 2


def part_of_page(page: int, dim: int) -> int:
    """Tokens that a bulk copy brings: a page, or the largest part of it of which tiles of keys are made."""
    return math.gcd(page, keys_of(dim))


def fits(query: Tensor, keys: Tensor) -> bool:
    """Whether `prefill` can: pages, or equal parts of them, are whole in a tile of keys, and lines begin at multiples of 16 bytes."""
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) != (9, 0):
        return False
    dim, page = query.shape[2], keys.shape[1]
    if (
        query.shape[1] // keys.shape[2] > HOPPER_ROWS
        or part_of_page(page, dim) < LEAST_PAGE
        or dim % 8
        or not WIDE // 2 < dim <= 4 * WIDE
    ):
        return False
    return keys.dtype == query.dtype and query.element_size() == 2


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, at: Columns, scale: float, out: Tensor, skip: int = 0,
    extras: Extras = PLAIN, *, qkv: Tensor, fewest: int = 1,
) -> None:  # fmt: skip
    tokens, heads, dim = query.shape
    blocks, page, kv_heads, _ = keys.shape
    rows, width = blocks * page, kv_heads * dim
    block_q, part = HOPPER_ROWS // (heads // kv_heads), part_of_page(page, dim)

    def pages(of: Tensor) -> Any:
        return TensorDescriptor(of.view(rows, width), [rows, width], [width, 1], [part, WIDE], LAYOUT)

    step = TensorDescriptor(qkv, list(qkv.shape), [qkv.stride(0), 1], [keys_of(dim), WIDE], LAYOUT)
    _prefill[((tokens - skip) // block_q + at.n - skip, kv_heads)](
        pages(keys), pages(values), step, query, keys, values, out, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        query if extras.sinks is None else extras.sinks, at.n, skip, fewest, rows, scale, extras.cap, extras.window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=part, SHARES=page // part, BLOCK_Q=block_q, KEYS=keys_of(dim),
        STAGES=4 if dim <= WIDE else 2, CAP=extras.cap > 0, SINKS=extras.sinks is not None, WINDOW=extras.window > 0, SEARCH=256,
        num_warps=4,
    )  # fmt: skip
