"""Attention whose every query is the same to the last bit, in a decode, in a prompt, in any chunk of it and beside whatever others.

    out = softmax(q k^T scale + mask) v        (Vaswani et al. 2017, section 3.2.1)

One kernel for all. A program has a tile of lines (queries x query heads of a kv head) and reads keys from their pages in tiles
that begin at multiples of KEYS, in splits that begin at multiples of SPLIT: absolute positions, which no step moves. Each split
has a maximum, a sum and a weighted sum of its own (Dao et al. 2022, algorithm 1), and splits are put together in their order, by
the same arithmetic in registers (one program has the whole context) as from memory (several share it, and the last one combines).
A key that a query does not see weighs zero and changes no bit. Scores are k q^T, keys by lines, and results v^T p: the 64 keys,
and the numbers of a head, are the rows of tensor core products, which Hopper multiplies by one instruction (wgmma) for any number
of lines, so a decode has few. Sums over keys go over the rows of a tile, whose order does not depend on its lines, and
contractions of products and sums are off.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import Columns

KEYS, SPLIT = 64, 512
DECODED, PROMPTS = (16, 4, 3), (32, 4, 3)  # lines of a tile, if a kv head has no more query heads; warps, stages
PROGRAMS = 3  # that a multiprocessor runs at once; contexts that were cut for more of them took longer
MOST_FLOATS = 1 << 24  # of the workspace for contexts that several programs share
LARGEST_DIM = 128


@triton.jit
def _put_together(top, total, result, m, l, acc):
    """Two parts of a context, the earlier one first: maximum, sum and weighted sum [d, lines], scores in powers of two."""
    higher = tl.maximum(top, m)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    of_first, of_second = tl.exp2(top - base), tl.exp2(m - base)
    total = total * of_first + l * of_second
    result = result * of_first[None, :] + acc * of_second[None, :]
    return higher, total, result


@triton.jit(do_not_specialize=["n"])
def _attention(
    query, keys, values, out, parts, sums, counters, blocks, blocks_stride, rows, starts, ends, n, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    LINES: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr,
    DECODES: tl.constexpr, WINDOW: tl.constexpr, SEARCH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """DECODES: each request has one token, or none (padding). SLOTS: splits of the longest context; 0: a program has all of its
    queries' splits."""
    BLOCK_Q: tl.constexpr = LINES // GROUP
    pdl.follow(PDL)
    kv, nth_program, programs = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    tile = tl.program_id(1)
    request = tile
    if not DECODES:
        tile = tl.num_programs(1) - 1 - tile  # late tiles of a prompt have the most keys: they go first
        request = -1  # becomes the last request whose first tile is not after this one
        for some in range(0, n, SEARCH):
            nth_request = some + tl.arange(0, SEARCH)
            begins = tl.load(ends + nth_request - 1, mask=(nth_request > 0) & (nth_request < n), other=0)
            fits = (begins // BLOCK_Q + nth_request <= tile) & (nth_request < n)
            request += tl.sum(fits.to(tl.int32), axis=0)
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    nth = 0
    if not DECODES:
        nth = (tile - (before // BLOCK_Q + request)) * BLOCK_Q
    if (nth < 0) | (nth >= count):
        return
    start = tl.load(starts + request)
    table = blocks + tl.load(rows + request).to(tl.int64) * blocks_stride
    last = start + tl.minimum(nth + BLOCK_Q, count)  # the first key that none of the queries sees
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(0, start + nth - window + 1)
    first_split = oldest // SPLIT
    num_splits = tl.cdiv(last, SPLIT) - first_split
    busy = tl.minimum(programs, num_splits)
    if nth_program >= busy:
        return
    line, d = tl.arange(0, LINES), tl.arange(0, BLOCK_D)
    nth_q = nth + line // GROUP
    head = kv * (HEADS // KV_HEADS) + line % GROUP
    real = (nth_q < count) & (line % GROUP < HEADS // KV_HEADS)
    inside = (d < DIM)[:, None] & real[None, :]
    at_query = (before + nth_q).to(tl.int64) * HEADS + head
    query_at = start + nth_q
    lines = at_query[None, :] * DIM + d[:, None]  # [d, lines], as all that follows
    q = tl.load(query + lines, mask=inside, other=0.0)
    top = tl.full((LINES,), float("-inf"), tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    result = tl.zeros((BLOCK_D, LINES), tl.float32)
    for split in range(first_split + nth_program, first_split + num_splits, programs):
        m = tl.full((LINES,), float("-inf"), tl.float32)
        l = tl.zeros((LINES,), tl.float32)
        acc = tl.zeros((BLOCK_D, LINES), tl.float32)
        first = tl.maximum(split * SPLIT, oldest // KEYS * KEYS)
        for begin in tl.range(first, tl.minimum((split + 1) * SPLIT, last), KEYS, num_stages=STAGES):
            at = begin + tl.arange(0, KEYS)
            there = at < last
            if WINDOW:  # the pages of keys before may have a new owner, and hold anything
                there = there & (at >= oldest)
            page = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
            place = (((page * PAGE + at % PAGE) * KV_HEADS + kv) * DIM)[:, None] + d[None, :]
            known = there[:, None] & (d < DIM)[None, :]
            k = tl.load(keys + place, mask=known, other=0.0)
            s = tl.dot(k, q) * scale
            seen = (at[:, None] <= query_at[None, :]) & there[:, None]
            if WINDOW:
                seen = seen & (at[:, None] > query_at[None, :] - window)
            s = tl.where(seen, s, float("-inf"))
            higher = tl.maximum(m, tl.max(s, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - base[None, :])
            fade = tl.exp2(m - base)
            l = l * fade + tl.sum(p, axis=0)
            v = tl.load(values + place, mask=known, other=0.0)
            acc = tl.dot(v.T, p.to(v.dtype), acc * fade[None, :])
            m = higher
        if SLOTS:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
            if busy > 1:
                slot = at_query * SLOTS + split
                tl.store(parts + slot[None, :] * DIM + d[:, None], acc, mask=inside)
                tl.store(sums + slot * 2, m, mask=real)
                tl.store(sums + slot * 2 + 1, l, mask=real)
        top, total, result = _put_together(top, total, result, m, l, acc)
    to = out + lines
    alone = True
    if SLOTS:
        alone = busy == 1
        if busy > 1:
            tl.debug_barrier()
            counter = counters + tl.program_id(1) * KV_HEADS + kv
            if tl.atomic_add(counter, 1, sem="acq_rel") == busy - 1:  # the last to arrive leaves the counter as it was
                tl.store(counter, 0)
                top = tl.full((LINES,), float("-inf"), tl.float32)
                total = tl.zeros((LINES,), tl.float32)
                result = tl.zeros((BLOCK_D, LINES), tl.float32)
                for split in range(first_split, first_split + num_splits):
                    slot = at_query * SLOTS + split
                    m = tl.load(sums + slot * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
                    l = tl.load(sums + slot * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
                    part = parts + slot[None, :] * DIM + d[:, None]
                    acc = tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
                    top, total, result = _put_together(top, total, result, m, l, acc)
                alone = True
    if alone:
        result = result / tl.where(total == 0.0, 1.0, total)[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=inside)


class Workspace:
    """Room for the parts of contexts that several programs share, for all layers and steps, which run one after the other. CUDA graphs
    keep its address: it never moves."""

    def __init__(self, device: torch.device) -> None:
        self.floats = torch.empty(MOST_FLOATS, device=device)
        self.counters = torch.zeros(1 << 12, dtype=torch.int32, device=device)


def programs_of(tiles: int, kv_heads: int, splits: int, floats: int, device: torch.device) -> int:
    """Programs that share the context of a tile of queries, so that the GPU is full: each choice gives the same bits. floats: of
    workspace that sharing takes."""
    each = PROGRAMS * pdl.multiprocessors(device) // (tiles * kv_heads)
    return min(each, splits) if each > 1 and floats <= MOST_FLOATS else 1


def attention(
    query: Tensor, keys: Tensor, values: Tensor, at: Columns, scale: float, out: Tensor, workspace: Workspace, *,
    longest: int, decodes: bool = False, window: int = 0, programs: int | None = None,
    tile: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    """query, out [t, heads, d] of the requests of the columns; keys, values [blocks, page, kv_heads, d], with those of this step.

    longest: tokens of a context at the most, whatever the step. decodes: each request has at most one token. window: the last keys that
    a query sees; 0: all. programs, tile (lines, warps, stages): for tests and benches, which hold that no bit depends on them."""
    tokens, heads, dim = query.shape
    _, page, kv_heads, _ = keys.shape
    group = triton.next_power_of_2(heads // kv_heads)
    lines, warps, stages = tile or (DECODED if decodes else PROMPTS)
    lines = max(group, lines)
    tiles = at.n if decodes else tokens // (lines // group) + at.n
    splits = triton.cdiv(longest, SPLIT)
    used = tokens * heads * splits
    if programs is None:
        programs = programs_of(tiles, kv_heads, splits, used * (dim + 2), query.device)
    assert programs == 1 or (used * (dim + 2) <= MOST_FLOATS and tiles * kv_heads <= len(workspace.counters))
    parts, sums = workspace.floats[: used * dim], workspace.floats[used * dim :]
    _attention[(kv_heads, tiles, programs)](
        query, keys, values, out, parts, sums, workspace.counters, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        at.n, scale * 1.4426950408889634, window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, GROUP=group, LINES=lines, KEYS=KEYS,
        BLOCK_D=triton.next_power_of_2(dim), SPLIT=SPLIT, SLOTS=splits if programs > 1 else 0, DECODES=decodes,
        WINDOW=window > 0, SEARCH=256, STAGES=stages, enable_fp_fusion=False, num_warps=warps, num_stages=stages,
        **pdl.options(query),
    )  # fmt: skip
