"""Multi-head latent attention over the paged cache (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): what its kernels share.

    k_t = (W_UK c_t, r_t),  v_t = W_UV c_t                                   c: latent [rank], r: rotated key [rotary]
    softmax(q k^T scale) v = W_UV (softmax((W_UK^T q_nope) c^T scale + q_rope r^T scale) c)

The right side is attention of all query heads over one head, whose keys are the cache's lines (c, r) and whose values are their first
`rank` numbers ("absorbed": nothing is projected up for each token). decode.py and prefill.py compute that; dense.py computes the left
side for the tokens of one step, which is fewer operations where there are many queries.

A line of the cache is [rank + rotary] numbers, behind which others may stand. `latent_tile` reads it once for keys and values. Requests
are columns as in kernels/prepare_inputs: rows, starts, ends. Masks are causal.
"""

import triton
import triton.language as tl


@triton.jit
def latent_tile(
    q, q_rope, m, l, acc, first, last, query_at, table, cache, scale,
    PAGE: tl.constexpr, LINE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Lines [first, last) for a tile of queries q [M, BLOCK_R], q_rope [M, BLOCK_P] at positions query_at [M]; acc [M, BLOCK_R].

    Without MASK a query sees all of them, and `last - first` is a multiple of BLOCK_N."""
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK_N)
        c, k = _lines(at, last, r, p, table, cache, PAGE, LINE, RANK, ROTARY, BLOCK_R, BLOCK_P, MASK)
        s = tl.dot(q, tl.trans(c))
        s = tl.dot(q_rope, tl.trans(k), s) * (scale * 1.4426950408889634)
        if MASK:
            s = tl.where((at[None, :] <= query_at[:, None]) & (at < last)[None, :], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        l = l * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), c, acc * fade[:, None])
        m = top
    return m, l, acc


@triton.jit
def latent_tile_of_lines(
    q, q_rope, m, l, acc, first, last, query_at, table, cache, scale,
    PAGE: tl.constexpr, LINE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same with lines as the rows of both products: q [BLOCK_R, H], acc [BLOCK_R, H]. Without MASK queries see all of them,
    whatever `last - first` is.

    A tensor core wants 64 rows: few query heads would leave most of them empty, lines of the cache fill them."""
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK_N)
        c, k = _lines(at, last, r, p, table, cache, PAGE, LINE, RANK, ROTARY, BLOCK_R, BLOCK_P, True)
        s = tl.dot(c, q)
        s = tl.dot(k, q_rope, s) * (scale * 1.4426950408889634)
        if MASK:
            s = tl.where((at < last)[:, None] & (at[:, None] <= query_at[None, :]), s, float("-inf"))
            top = tl.maximum(m, tl.max(s, axis=0))
            base = tl.where(top == float("-inf"), 0.0, top)
        else:
            s = tl.where((at < last)[:, None], s, float("-inf"))
            top = tl.maximum(m, tl.max(s, axis=0))
            base = top
        weights = tl.exp2(s - base[None, :])
        fade = tl.exp2(m - base)
        l = l * fade + tl.sum(weights, axis=0)
        acc = tl.dot(tl.trans(c), weights.to(q.dtype), acc * fade[None, :])
        m = top
    return m, l, acc


@triton.jit
def _lines(
    at, last, r, p, table, cache,
    PAGE: tl.constexpr, LINE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Latents [N, BLOCK_R] and rotated keys [N, BLOCK_P] of these tokens. From `last` on they are the last one's."""
    if MASK:
        at = tl.minimum(at, last - 1)
    page = tl.load(table + at // PAGE).to(tl.int64)
    line = cache + (page * PAGE + at % PAGE) * LINE
    if BLOCK_R == RANK:
        c = tl.load(line[:, None] + r[None, :])
    else:
        c = tl.load(line[:, None] + r[None, :], mask=(r < RANK)[None, :], other=0.0)
    if BLOCK_P == ROTARY:
        k = tl.load(line[:, None] + RANK + p[None, :])
    else:
        k = tl.load(line[:, None] + RANK + p[None, :], mask=(p < ROTARY)[None, :], other=0.0)
    return c, k


@triton.jit
def ask_for(
    first, last, table, cache, PAGE: tl.constexpr, LINE: tl.constexpr, READ: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Have the first READ numbers of the lines of tokens first .. first + BLOCK_N - 1 brought to the L2 cache, by halves.

    Of none from `last` on."""
    half = tl.arange(0, 2 * BLOCK_N)
    at = tl.minimum(first + half // 2, last - 1)
    page = tl.load(table + at // PAGE).to(tl.int64)
    place = cache + (page * PAGE + at % PAGE) * LINE + half % 2 * (READ // 2)
    BYTES: tl.constexpr = READ // 2 * (cache.dtype.element_ty.primitive_bitwidth // 8)
    tl.static_assert(BYTES % 16 == 0)
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.b32 $0, 0;", "=r,l", [place], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
