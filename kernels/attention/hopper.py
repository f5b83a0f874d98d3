"""Attention of prompts on Hopper's own instructions, in Triton's Gluon dialect. The formula is kernel.py's, the reference prefill.py.

A program has 128 rows (queries x query heads of a kv head). One warp brings tiles of keys and values into shared memory by bulk copies
(TMA), page by page for what earlier steps computed, in one piece for the step's own tokens; two groups of four warps multiply (wgmma),
64 rows each, and take the scores of the next tile while the softmax of this one is computed (Shah et al. 2024, "FlashAttention-3").

Numbers of others reach nobody: a page that is not the request's, before its window or behind its last full one, is not read but filled
with zeros, and of its last page only its own tokens are.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras

ROWS = 128  # of a tile: two groups of warps have 64 each
KEYS = 128  # of a tile
WIDE = 64  # numbers of a head that one bulk copy brings: 128 bytes, which is how far shared memory is swizzled
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name from Triton 3.9 on
_together = getattr(gl, "barrier", None) or gl.thread_barrier  # likewise
_memory = gl.shared_memory_descriptor
_view = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # likewise

ROWS_ = gl.constexpr(ROWS)
KEYS_ = gl.constexpr(KEYS)
WIDE_ = gl.constexpr(WIDE)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]), 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of queries, by a group of four warps
TAIL = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))  # of a page's own tokens, by one warp
_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
SWIZZLED = gl.constexpr(_LAYOUT)


@gluon.jit
def _bring_edge(
    pages, pointer, full, stage, nth, row_limit, table, start, oldest_page, column,
    PAGE: gl.constexpr, STRIDE: gl.constexpr, HALVES: gl.constexpr, by_page,
):  # fmt: skip
    """A tile of the context whose first or last pages are not the request's, or whose last page is shared with this step."""
    PAGES: gl.constexpr = KEYS_ // PAGE
    whole_pages = start // PAGE
    rest = start % PAGE
    first = nth // PAGE
    has_rest = (rest > 0) & (whole_pages < first + PAGES)
    if has_rest:
        page = gl.load(table + whole_pages)
        r = gl.arange(0, PAGE, gl.SliceLayout(1, TAIL))
        c = gl.arange(0, WIDE_, gl.SliceLayout(0, TAIL))
        line = (page.to(gl.int64) * PAGE + r) * STRIDE + column
        for half in gl.static_range(HALVES):
            place = pointer + line[:, None] + (half * WIDE_ + c)[None, :]
            some = gl.load(place, mask=(r < rest)[:, None] & (c < WIDE_)[None, :], other=0.0)
            by_page.index((stage * HALVES + half) * PAGES + whole_pages - first).store(some)
        fence_async_shared()
        _together()
    mbarrier.expect(full, KEYS_ * WIDE_ * HALVES * 2, pred=(rest == 0) | (whole_pages >= first + PAGES))
    mbarrier.expect(full, (KEYS_ - PAGE) * WIDE_ * HALVES * 2, pred=has_rest)
    for p in range(PAGES):
        nth_page = first + p
        is_own = (nth_page < whole_pages) & (nth_page >= oldest_page)
        page = gl.load(table + nth_page, mask=is_own, other=0)
        row = gl.where(is_own, page * PAGE, row_limit)  # what is behind the last row arrives as zeros
        by_tail = (nth_page == whole_pages) & (rest > 0)
        for half in gl.static_range(HALVES):
            to = by_page.index((stage * HALVES + half) * PAGES + p)
            _copy(pages, [row, column + half * WIDE_], full, to, pred=by_tail == 0)


@gluon.jit
def _place(tile, num_masked, context_masked, masked_of_context, own_masked, num_context):
    """Whether a tile's keys are the context's, and its first one there or among the step's own. Tiles that need a mask go first."""
    free = tile - num_masked
    if free < 0:
        of_context = tile < masked_of_context
        nth = gl.where(of_context, context_masked + tile, own_masked + tile - masked_of_context)
    else:
        of_context = free < num_context
        nth = gl.where(of_context, free, free - num_context)
    return of_context, nth * KEYS_


@gluon.jit
def _producer(
    pages, pointer, step, buffer, all_full, all_free, of_values: gl.constexpr, row_limit, table, start, oldest, before, kv,
    num_masked, context_masked, masked_of_context, own_masked, num_context, total,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the tiles of keys, or of values, one after the other."""
    HALVES: gl.constexpr = DIM // WIDE_
    PAGES: gl.constexpr = KEYS_ // PAGE
    by_page = _view(buffer, buffer.dtype, [STAGES * HALVES * PAGES, PAGE, WIDE_], SWIZZLED)
    oldest_page = oldest // PAGE
    column = kv * DIM
    step_column = (HEADS + kv) * DIM
    if of_values:
        step_column += KV_HEADS * DIM
    for tile in range(total):
        stage = tile % STAGES
        turn = ((tile // STAGES) & 1) ^ 1
        full, free = all_full.index(stage), all_free.index(stage)
        of_context, nth = _place(tile, num_masked, context_masked, masked_of_context, own_masked, num_context)
        if of_context:
            first = nth // PAGE
            if (nth + KEYS_ <= start) & (first >= oldest_page):
                rows = ()
                for p in gl.static_range(PAGES):
                    rows = rows + (gl.load(table + first + p) * PAGE,)  # type: ignore[assignment]
                mbarrier.wait(free, turn)
                mbarrier.expect(full, KEYS_ * WIDE_ * HALVES * 2)
                for p in gl.static_range(PAGES):
                    for half in gl.static_range(HALVES):
                        to = by_page.index((stage * HALVES + half) * PAGES + p)
                        _copy(pages, [rows[p], column + half * WIDE_], full, to)
            else:
                mbarrier.wait(free, turn)
                _bring_edge(
                    pages, pointer, full, stage, nth, row_limit, table, start, oldest_page, column,
                    PAGE, KV_HEADS * DIM, HALVES, by_page,
                )  # fmt: skip
        else:
            mbarrier.wait(free, turn)
            mbarrier.expect(full, KEYS_ * WIDE_ * HALVES * 2)
            for half in gl.static_range(HALVES):
                _copy(step, [before + nth, step_column + half * WIDE_], full, buffer.index(stage * HALVES + half))


@gluon.jit
def _scores(q_buffer, k_buffer, which, stage, HALVES: gl.constexpr):
    """Starts q k^T of a tile."""
    s = gl.zeros([64, KEYS_], gl.float32, SCORES)
    for half in gl.static_range(HALVES):
        s = warpgroup_mma(
            q_buffer.index(which * HALVES + half), k_buffer.index(stage * HALVES + half).permute([1, 0]), s,
            use_acc=half > 0, is_async=True,
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
        at = gl.where(of_context, nth, start + nth) + gl.arange(0, KEYS_, gl.SliceLayout(0, SCORES))
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
def _turn(
    tile, weights, low, high, m, l, which, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, start, query_at,
    num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
    HALVES: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of a tile, while the values of the tile before are weighed and summed."""
    stage = tile % STAGES
    old, old_turn = (tile - 1) % STAGES, ((tile - 1) // STAGES) & 1
    of_context, nth = tile < 0, tile
    if MASK:
        of_context, nth = _place(tile, num_masked, context_masked, masked_of_context, own_masked, num_context)
    s = _scores(q_buffer, k_buffer, which, stage, HALVES)
    mbarrier.wait(v_full.index(old), old_turn)
    low = warpgroup_mma(weights, v_buffer.index(old * HALVES), low, is_async=True)
    if HALVES > 1:
        high = warpgroup_mma(weights, v_buffer.index(old * HALVES + 1), high, is_async=True)
    s = warpgroup_mma_wait(HALVES, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    p, fade, m, l = _softmax(s, m, l, of_context, nth, start, query_at, scale, cap, window, MASK, CAP, WINDOW)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, OUT))
    # The next keys are awaited here, so that the compiler does not wait for the values' sums before the softmax.
    mbarrier.wait(k_full.index((tile + 1) % STAGES), ((tile + 1) // STAGES) & 1, pred=tile + 1 < total)
    if HALVES > 1:
        low, high = warpgroup_mma_wait(0, deps=[low, high])
        high = high * fade[:, None]
    else:
        low = warpgroup_mma_wait(0, deps=[low])
    mbarrier.arrive(v_free.index(old))
    return gl.convert_layout(p.to(weights.dtype), WEIGHTS), low * fade[:, None], high, m, l


@gluon.jit
def _consumer(
    which, query, out, sinks, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, before, count, start, nth, kv,
    num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    CAP: gl.constexpr, SINKS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HEADS // KV_HEADS
    HALVES: gl.constexpr = DIM // WIDE_
    row = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    nth_q = nth + row // GROUP
    real = (row < BLOCK_Q * GROUP) & (nth_q < count)
    line = ((before + nth_q).to(gl.int64) * HEADS + kv * GROUP + row % GROUP) * DIM
    c = gl.arange(0, WIDE_, gl.SliceLayout(0, LINES))
    inside = real[:, None] & (c < WIDE_)[None, :]
    for half in gl.static_range(HALVES):
        some = gl.load(query + line[:, None] + (half * WIDE_ + c)[None, :], mask=inside, other=0.0)
        q_buffer.index(which * HALVES + half).store(some)
    fence_async_shared()
    _together()
    s_row = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_at = start + nth + s_row // GROUP
    if SINKS:
        sink = gl.load(sinks + kv * GROUP + s_row % GROUP)
        m = sink.to(gl.float32) * 1.4426950408889634
        l = gl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    low = gl.zeros([64, WIDE_], gl.float32, OUT)
    high = low
    of_context, first = _place(0, num_masked, context_masked, masked_of_context, own_masked, num_context)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q_buffer, k_buffer, which, 0, HALVES)])
    mbarrier.arrive(k_free.index(0))
    p, _, m, l = _softmax(s, m, l, of_context, first, start, query_at, scale, cap, window, True, CAP, WINDOW)
    weights = gl.convert_layout(p.to(query.dtype.element_ty), WEIGHTS)
    mbarrier.wait(k_full.index(1 % STAGES), (1 // STAGES) & 1, pred=total > 1)
    for tile in range(1, num_masked):
        weights, low, high, m, l = _turn(
            tile, weights, low, high, m, l, which, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, start, query_at,
            num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
            HALVES, STAGES, True, CAP, WINDOW,
        )  # fmt: skip
    for tile in range(num_masked, total):
        weights, low, high, m, l = _turn(
            tile, weights, low, high, m, l, which, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, start, query_at,
            num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
            HALVES, STAGES, False, CAP, WINDOW,
        )  # fmt: skip
    old, old_turn = (total - 1) % STAGES, ((total - 1) // STAGES) & 1
    mbarrier.wait(v_full.index(old), old_turn)
    low = warpgroup_mma(weights, v_buffer.index(old * HALVES), low, is_async=True)
    if HALVES > 1:
        high = warpgroup_mma(weights, v_buffer.index(old * HALVES + 1), high, is_async=True)
        low, high = warpgroup_mma_wait(0, deps=[low, high])
    else:
        low = warpgroup_mma_wait(0, deps=[low])
    inverse = gl.convert_layout(1.0 / gl.where(l == 0.0, 1.0, l), gl.SliceLayout(1, OUT))
    q_buffer.index(which * HALVES).store((low * inverse[:, None]).to(out.dtype.element_ty))
    if HALVES > 1:
        q_buffer.index(which * HALVES + 1).store((high * inverse[:, None]).to(out.dtype.element_ty))
    _together()
    for half in gl.static_range(HALVES):
        to = out + line[:, None] + (half * WIDE_ + c)[None, :]
        gl.store(to, q_buffer.index(which * HALVES + half).load(LINES), mask=inside)


@gluon.jit(do_not_specialize=["n", "skip", "fewest"])
def _prefill(
    key_pages, value_pages, step, query, keys, values, out, blocks, blocks_stride, rows, starts, ends, sinks, n, skip, fewest,
    row_limit, scale, cap, window,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, WINDOW: gl.constexpr, SEARCH: gl.constexpr,
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
    own_end = (gl.minimum(nth + BLOCK_Q, count) + KEYS_ - 1) // KEYS_
    if WINDOW:  # all tiles have a mask
        oldest = gl.maximum(0, start + nth - window + 1)
        context_end = (start + KEYS_ - 1) // KEYS_
        context_masked = gl.minimum(context_end, oldest // KEYS_)
        masked_of_context = context_end - context_masked
        own_masked = gl.maximum(0, nth - window + 1) // KEYS_
        num_context = 0
        num_masked = masked_of_context + own_end - own_masked
        total = num_masked
    else:  # those that some query of the tile does not see whole
        num_context = start // KEYS_
        context_masked = num_context
        masked_of_context = (start % KEYS_ > 0).to(gl.int32)
        own_masked = nth // KEYS_
        num_masked = masked_of_context + own_end - own_masked
        total = num_masked + num_context + own_masked
    HALVES: gl.constexpr = DIM // WIDE_
    q_buffer = gl.allocate_shared_memory(query.dtype.element_ty, [2 * HALVES, 64, WIDE_], SWIZZLED)
    k_buffer = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES * HALVES, KEYS_, WIDE_], SWIZZLED)
    v_buffer = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES * HALVES, KEYS_, WIDE_], SWIZZLED)
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
    _together()
    gl.warp_specialize(
        [
            (_consumer, (
                0, query, out, sinks, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, before, count, start, nth, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
                HEADS, KV_HEADS, DIM, BLOCK_Q, STAGES, CAP, SINKS, WINDOW,
            )),
            (_consumer, (
                1, query, out, sinks, q_buffer, k_buffer, v_buffer, k_full, k_free, v_full, v_free, before, count, start, nth, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total, scale, cap, window,
                HEADS, KV_HEADS, DIM, BLOCK_Q, STAGES, CAP, SINKS, WINDOW,
            )),
            (_producer, (
                key_pages, keys, step, k_buffer, k_full, k_free, False, row_limit, table, start, oldest, before, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total,
                HEADS, KV_HEADS, DIM, PAGE, STAGES,
            )),
            (_producer, (
                value_pages, values, step, v_buffer, v_full, v_free, True, row_limit, table, start, oldest, before, kv,
                num_masked, context_masked, masked_of_context, own_masked, num_context, total,
                HEADS, KV_HEADS, DIM, PAGE, STAGES,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip


def fits(query: Tensor, keys: Tensor) -> bool:
    """Whether `prefill` can: its tiles are halves of 64 numbers, and pages that are whole in a tile of keys."""
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) != (9, 0):
        return False
    whole = query.shape[1] // keys.shape[2] <= ROWS and keys.shape[1] <= KEYS
    return whole and query.shape[2] in (WIDE, 2 * WIDE) and keys.dtype == query.dtype and query.element_size() == 2


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
    qkv: Tensor,
    fewest: int = 1,
) -> None:
    """As prefill.py's."""
    tokens, heads, dim = query.shape
    blocks, page, kv_heads, _ = keys.shape
    rows, width = blocks * page, kv_heads * dim
    block_q = ROWS // (heads // kv_heads)

    def pages(of: Tensor) -> Any:
        return TensorDescriptor(of.view(rows, width), [rows, width], [width, 1], [page, WIDE], _LAYOUT)

    step = TensorDescriptor(qkv, list(qkv.shape), [qkv.stride(0), 1], [KEYS, WIDE], _LAYOUT)
    _prefill[((tokens - skip) // block_q + at.n - skip, kv_heads)](
        pages(keys), pages(values), step, query, keys, values, out, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        query if extras.sinks is None else extras.sinks, at.n, skip, fewest, rows, scale, extras.cap, extras.window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, BLOCK_Q=block_q, STAGES=4 if dim == WIDE else 2,
        CAP=extras.cap > 0, SINKS=extras.sinks is not None, WINDOW=extras.window > 0, SEARCH=256, num_warps=4,
    )  # fmt: skip
