"""The first keys of contexts that are the same for several requests with one new token, read once for all of them (cascade attention).

A prefix is shared where block tables begin with the same pages: a system prompt that the prefix cache has found, or several samples of
one prompt. The query heads of many requests are the rows of one tile, so that a prefix costs its bytes once, and its products fill the
tensor cores (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade Inference"). Each piece of a prefix leaves its part of every
row's sum; decode.py reads the rest of each context, and puts all parts together. Several prefixes, of as many clusters of requests, are
one launch. The formula is kernel.py's: every query stands behind all of these keys, so nothing is masked.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import (
    EVERYTHING,
    ITEM,
    PLAIN,
    PREFIX_STEP,
    Columns,
    Extras,
    SharedPrefixes,
    paged_tile,
)


@triton.jit
def _shared_prefix(
    query, keys, values, parts, sums, items, members, blocks, blocks_stride, rows, starts, ends, slopes, scale, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ITEM: tl.constexpr, LINES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, CAP: tl.constexpr, SLOPES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv, item = tl.program_id(0), items + tl.program_id(1) * ITEM
    low, count = tl.load(item), tl.load(item + 1)
    first, last, slot = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    real_group: tl.constexpr = HEADS // KV_HEADS
    m_at = tl.arange(0, GROUP)
    head = kv * real_group + m_at % LINES
    real = (m_at // LINES < count) & (m_at % LINES < real_group)
    request = tl.load(members + low + m_at // LINES, mask=real, other=0)
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    leader = tl.load(members + low)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if first >= last:  # a graph has room for more
        return
    table = blocks + tl.load(rows + leader).to(tl.int64) * blocks_stride
    query_at = tl.zeros((GROUP,), tl.int32)
    slope = 0.0
    if SLOPES:
        query_at = tl.load(starts + request, mask=real, other=0)
        slope = tl.load(slopes + head, mask=real, other=0.0)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    q = tl.load(query + (before.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    m = tl.full((GROUP,), float("-inf"), tl.float32)
    l = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
    m, l, acc = paged_tile(
        q, m, l, acc, first, last, query_at, query_at, table, keys, values, kv, scale, cap, slope, 0,
        PAGE, KV_HEADS, DIM, BLOCK_N, BLOCK_D, False, CAP, 0, SLOPES,
    )  # fmt: skip
    place = (request.to(tl.int64) * HEADS + head) * SLOTS + slot
    tl.store(parts + place[:, None] * DIM + d[None, :], acc, mask=inside)
    tl.store(sums + place * 2, m, mask=real)
    tl.store(sums + place * 2 + 1, l, mask=real)


def shared_prefix(
    query: Tensor, keys: Tensor, values: Tensor, at: Columns, shared: SharedPrefixes, scale: float,
    workspace: tuple[Tensor, Tensor, Tensor], splits: int, extras: Extras = PLAIN, *, block_n: int = 64, warps: int = 4,
    stages: int = 2,
) -> None:  # fmt: skip
    """The parts of all prefixes of `shared`, for the `decode` that follows with the same query, workspace and splits.

    query [t, heads, d], rotated; the prefixes' keys and values are in the cache. extras: of a layer that sees all keys."""
    assert extras.span == EVERYTHING
    assert PREFIX_STEP % block_n == 0
    _, page, kv_heads, dim = keys.shape
    heads = query.shape[1]
    lines = triton.next_power_of_2(heads // kv_heads)
    parts, sums, _ = workspace
    _shared_prefix[(kv_heads, len(shared.items))](
        query, keys, values, parts, sums, shared.items, shared.members, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        query if extras.slopes is None else extras.slopes, scale * extras.k_scale, extras.cap,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, ITEM=ITEM, LINES=lines,
        GROUP=max(16, triton.next_power_of_2(shared.tile * lines)), BLOCK_N=block_n, BLOCK_D=triton.next_power_of_2(dim),
        SLOTS=shared.slots(splits), CAP=extras.cap > 0, SLOPES=extras.slopes is not None,
        num_warps=warps, num_stages=stages, **pdl.options(query),
    )  # fmt: skip
