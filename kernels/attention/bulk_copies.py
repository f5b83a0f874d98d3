"""Brings tiles of keys and values into shared memory by bulk copies (TMA), for hopper.py: the producers of its programs.

What earlier steps computed comes page by page, the step's own tokens in one piece. Numbers of others reach nobody: a page that is not
the request's, before its window or behind its last full one, is not read but filled with zeros, and of its last page only its own
tokens are. Pages that are longer than a tile, or no part of it (models with recurrent states have such), are SHARES pages of PAGE
tokens here, which lie side by side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

WIDE = 64  # numbers of a head that one bulk copy brings, a part: 128 bytes, which is how far shared memory is swizzled
LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name from Triton 3.9 on
together = getattr(gl, "barrier", None) or gl.thread_barrier  # likewise
_memory = gl.shared_memory_descriptor
_view = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # likewise

WIDE_ = gl.constexpr(WIDE)
SWIZZLED = gl.constexpr(LAYOUT)
TAIL = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))  # of a page's own tokens, by one warp


@gluon.jit
def _page_of(table, nth, SHARES: gl.constexpr):
    """The place of a request's nth page of PAGE tokens, which must be its own."""
    if SHARES == 1:
        return gl.load(table + nth)
    else:
        return gl.load(table + nth // SHARES) * SHARES + nth % SHARES


@gluon.jit
def _bring_edge(
    pages, pointer, full, stage, nth, row_limit, table, start, oldest_page, column,
    PAGE: gl.constexpr, SHARES: gl.constexpr, STRIDE: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, PARTS: gl.constexpr, by_page,
):  # fmt: skip
    """A tile of the context whose first or last pages are not the request's, or whose last page is shared with this step."""
    PAGES: gl.constexpr = KEYS // PAGE
    whole_pages = start // PAGE
    rest = start % PAGE
    first = nth // PAGE
    has_rest = (rest > 0) & (whole_pages < first + PAGES)
    if has_rest:
        page = _page_of(table, whole_pages, SHARES)
        r = gl.arange(0, PAGE, gl.SliceLayout(1, TAIL))
        c = gl.arange(0, WIDE_, gl.SliceLayout(0, TAIL))
        line = (page.to(gl.int64) * PAGE + r) * STRIDE + column
        for part in gl.static_range(PARTS):
            place = pointer + line[:, None] + (part * WIDE_ + c)[None, :]
            some = gl.load(place, mask=(r < rest)[:, None] & (part * WIDE_ + c < DIM)[None, :], other=0.0)
            by_page.index((stage * PARTS + part) * PAGES + whole_pages - first).store(some)
        fence_async_shared()
        together()
    mbarrier.expect(full, KEYS * WIDE_ * PARTS * 2, pred=(rest == 0) | (whole_pages >= first + PAGES))
    mbarrier.expect(full, (KEYS - PAGE) * WIDE_ * PARTS * 2, pred=has_rest)
    for p in range(PAGES):
        nth_page = first + p
        is_own = (nth_page < whole_pages) & (nth_page >= oldest_page)
        page = _page_of(table, gl.where(is_own, nth_page, whole_pages), SHARES)  # what is not its own is not asked for
        row = gl.where(is_own, page * PAGE, row_limit)  # what is behind the last row arrives as zeros
        by_tail = (nth_page == whole_pages) & (rest > 0)
        for part in gl.static_range(PARTS):
            to = by_page.index((stage * PARTS + part) * PAGES + p)
            _copy(pages, [row, column + part * WIDE_], full, to, pred=by_tail == 0)


@gluon.jit
def place(tile, num_masked, context_masked, masked_of_context, own_masked, num_context, KEYS: gl.constexpr):
    """Whether a tile's keys are the context's, and its first one there or among the step's own. Tiles that need a mask go first."""
    free = tile - num_masked
    if free < 0:
        of_context = tile < masked_of_context
        nth = gl.where(of_context, context_masked + tile, own_masked + tile - masked_of_context)
    else:
        of_context = free < num_context
        nth = gl.where(of_context, free, free - num_context)
    return of_context, nth * KEYS


@gluon.jit
def producer(
    pages, pointer, step, buffer, all_full, all_free, of_values: gl.constexpr, row_limit, table, start, oldest, before, kv,
    num_masked, context_masked, masked_of_context, own_masked, num_context, total,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, SHARES: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the tiles of keys, or of values, one after the other."""
    PARTS: gl.constexpr = (DIM + WIDE_ - 1) // WIDE_
    PAGES: gl.constexpr = KEYS // PAGE
    by_page = _view(buffer, buffer.dtype, [STAGES * PARTS * PAGES, PAGE, WIDE_], SWIZZLED)
    oldest_page = oldest // PAGE
    column = kv * DIM
    step_column = (HEADS + kv) * DIM
    if of_values:
        step_column += KV_HEADS * DIM
    for tile in range(total):
        stage = tile % STAGES
        turn = ((tile // STAGES) & 1) ^ 1
        full, free = all_full.index(stage), all_free.index(stage)
        of_context, nth = place(tile, num_masked, context_masked, masked_of_context, own_masked, num_context, KEYS)
        if of_context:
            first = nth // PAGE
            if (nth + KEYS <= start) & (first >= oldest_page):
                rows = ()
                for p in gl.static_range(PAGES):
                    rows = rows + (_page_of(table, first + p, SHARES) * PAGE,)  # type: ignore[assignment]
                mbarrier.wait(free, turn)
                mbarrier.expect(full, KEYS * WIDE_ * PARTS * 2)
                for p in gl.static_range(PAGES):
                    for part in gl.static_range(PARTS):
                        to = by_page.index((stage * PARTS + part) * PAGES + p)
                        _copy(pages, [rows[p], column + part * WIDE_], full, to)
            else:
                mbarrier.wait(free, turn)
                _bring_edge(
                    pages, pointer, full, stage, nth, row_limit, table, start, oldest_page, column,
                    PAGE, SHARES, KV_HEADS * DIM, DIM, KEYS, PARTS, by_page,
                )  # fmt: skip
        else:
            mbarrier.wait(free, turn)
            mbarrier.expect(full, KEYS * WIDE_ * PARTS * 2)
            for part in gl.static_range(PARTS):
                _copy(step, [before + nth, step_column + part * WIDE_], full, buffer.index(stage * PARTS + part))
