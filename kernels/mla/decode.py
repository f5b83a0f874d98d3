"""Absorbed attention of requests with one new token, or with the few of drafts that a step verifies: several programs share each
context, a second kernel combines what they found.

The formula is kernel.py's. The grids do not depend on the lengths, as CUDA graphs need. Lines of the cache are read once for all query
heads of a program and for both products, so a decode of up to 64 heads waits for memory alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.mla.kernel import ask_for, latent_tile, latent_tile_of_lines
from meshlm.kernels.mla.tiles import DecodeTile

REGISTERS = 128  # of a thread, where two programs of 8 warps share a multiprocessor
COMBINED = 8192  # numbers of the parts that a program combines


@triton.jit
def share(
    request,
    split,
    rows,
    starts,
    ends,
    blocks,
    blocks_stride,
    splits,
    BLOCK_N: tl.constexpr,
    VERIFY: tl.constexpr = False,
):
    """First token of the step, tokens, block table, first and last line of this split, splits that have lines."""
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    length = tl.load(starts + request) + 1
    if VERIFY:
        length += tl.maximum(count, 1) - 1
    table = blocks + tl.load(rows + request).to(tl.int64) * blocks_stride
    tiles = tl.cdiv(length, BLOCK_N)
    each = tl.cdiv(tiles, splits)
    first = split * each * BLOCK_N
    return before, count, table, first, tl.minimum(length, first + each * BLOCK_N), tl.cdiv(tiles, each)


@triton.jit(do_not_specialize=["splits"])
def _decode(
    absorbed, query, query_stride, cache, out, parts, sums, blocks, blocks_stride, rows, starts, ends, splits, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, LINE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    OF_LINES: tl.constexpr, STAGES: tl.constexpr, ASKS: tl.constexpr, VERIFY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before, count, table, first, last, used = share(
        request, split, rows, starts, ends, blocks, blocks_stride, splits, BLOCK_N, VERIFY
    )
    heads = HEADS  # of all tokens
    if VERIFY:
        heads = count * HEADS
        others = group * BLOCK_H >= heads
    else:
        others = count != 1
    if ASKS:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
        if (not others) & (split < used):
            ask_for(first, last, table, cache, PAGE, LINE, RANK + ROTARY, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if others | (split >= used):  # padding, a prompt in a step of both, or a context of few tiles
        return
    h, r, p = group * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    at = before.to(tl.int64)
    q_line = absorbed + (at * HEADS + h) * RANK
    if VERIFY:
        p_line = query + (at + h // HEADS) * query_stride + h % HEADS * (NOPE + ROTARY) + NOPE
        query_at = tl.load(starts + request) + h // HEADS
    else:
        p_line = query + at * query_stride + h * (NOPE + ROTARY) + NOPE
        query_at = tl.zeros((BLOCK_H,), tl.int32) + last
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_H,), tl.float32)
    if OF_LINES:
        q = tl.load(q_line[None, :] + r[:, None], mask=(r < RANK)[:, None] & (h < heads)[None, :], other=0.0)
        q_rope = tl.load(p_line[None, :] + p[:, None], mask=(p < ROTARY)[:, None] & (h < heads)[None, :], other=0.0)
        acc = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
        m, l, acc = latent_tile_of_lines(
            q, q_rope, m, l, acc, first, last, query_at, table, cache, scale,
            PAGE, LINE, RANK, ROTARY, BLOCK_N, BLOCK_R, BLOCK_P, VERIFY, STAGES,
        )  # fmt: skip
        acc = tl.trans(acc)
    else:
        q = tl.load(q_line[:, None] + r[None, :], mask=(h < heads)[:, None] & (r < RANK)[None, :], other=0.0)
        q_rope = tl.load(p_line[:, None] + p[None, :], mask=(h < heads)[:, None] & (p < ROTARY)[None, :], other=0.0)
        acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
        m, l, acc = latent_tile(
            q, q_rope, m, l, acc, first, last, query_at, table, cache, scale,
            PAGE, LINE, RANK, ROTARY, BLOCK_N, BLOCK_R, BLOCK_P, True, STAGES,
        )  # fmt: skip
    inside = (h < heads)[:, None] & (r < RANK)[None, :]
    if used == 1:
        found = acc / l[:, None]
        tl.store(out + ((at * HEADS + h) * RANK)[:, None] + r[None, :], found.to(out.dtype.element_ty), mask=inside)
        return
    if VERIFY:
        place = (at * HEADS + h) * splits + split
    else:
        place = (request.to(tl.int64) * HEADS + h) * splits + split
    tl.store(parts + place[:, None] * RANK + r[None, :], acc, mask=inside)
    tl.store(sums + place * 2, m, mask=h < heads)
    tl.store(sums + place * 2 + 1, l, mask=h < heads)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    out, parts, sums, blocks, blocks_stride, rows, starts, ends, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    VERIFY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, request = tl.program_id(0), tl.program_id(1)
    before, count, _, _, _, used = share(request, 0, rows, starts, ends, blocks, blocks_stride, splits, BLOCK_N, VERIFY)
    if VERIFY:
        others = head >= count * HEADS
    else:
        others = count != 1
    if PDL:
        tl.extra.cuda.gdc_wait()
    if others | (used == 1):
        return
    s, r = tl.arange(0, SPLITS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if VERIFY:
        base = (before.to(tl.int64) * HEADS + head) * splits + s
    else:
        base = (request.to(tl.int64) * HEADS + head) * splits + s
    m = tl.load(sums + base * 2, mask=s < used, other=float("-inf"))
    l = tl.load(sums + base * 2 + 1, mask=s < used, other=0.0)
    weights = tl.exp2(m - tl.max(m, axis=0))
    inside = (s < used)[:, None] & (r < RANK)[None, :]
    part = tl.load(parts + base[:, None] * RANK + r[None, :], mask=inside, other=0.0)
    found = tl.sum(part * weights[:, None], axis=0) / tl.sum(l * weights, axis=0)
    tl.store(out + (before.to(tl.int64) * HEADS + head) * RANK + r, found.to(out.dtype.element_ty), mask=r < RANK)


def asks(cache: Tensor, read: int) -> bool:
    """Whether lines, of which so many numbers are read, can be asked for before their turn: bulk copies of Hopper and later, of
    multiples of 16 bytes."""
    return pdl.supported() and read * cache.element_size() % 32 == 0 and cache.shape[2] * cache.element_size() % 16 == 0


def decode(
    absorbed: Tensor, query: Tensor, cache: Tensor, at: Columns, scale: float, out: Tensor,
    workspace: tuple[Tensor, Tensor], tile: DecodeTile, rotary: int = 0, queries: int = 1,
) -> None:  # fmt: skip
    """Attention of those of the first n requests of the columns that have one token: absorbed, out [>= n, heads, rank], contiguous.
    With `queries` above 1 of all of them, which have 0 .. `queries` tokens each; then n is the number of tokens here.

    query [>= n, heads, nope + rotary] gives the rotated part; its first dimension may be strided. cache [blocks, page, rank + rotary].
    workspace: float32 with room for [n, heads, splits, rank] and [n, heads, splits, 2]. rotary: where other numbers stand behind it in
    lines; 0: it ends them."""
    split_decode(absorbed, query, cache, at, scale, out, workspace, tile, rotary, queries)
    if tile.splits > 1:
        heads, rank = absorbed.shape[1:]
        most = triton.next_power_of_2(tile.splits)
        width = min(triton.next_power_of_2(rank), COMBINED // most)
        _combine[(heads * queries, at.n, -(-rank // width))](
            out, *workspace, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends, tile.splits,
            HEADS=heads, RANK=rank, BLOCK_N=tile.block_n, COLUMNS=width, SPLITS=most, VERIFY=queries > 1,
            num_warps=4, **pdl.options(query),
        )  # fmt: skip


def split_decode(
    absorbed: Tensor, query: Tensor, cache: Tensor, at: Columns, scale: float, out: Tensor,
    workspace: tuple[Tensor, Tensor], tile: DecodeTile, rotary: int = 0, queries: int = 1,
) -> None:  # fmt: skip
    """The first launch of `decode`. What one program found of a context is in `out`, what several found of it in the workspace."""
    heads, rank = absorbed.shape[1:]
    rotary = rotary or cache.shape[2] - rank
    options: dict[str, int] = {**pdl.options(query)}
    if tile.warps * tile.block_h == 128:  # so that a multiprocessor has room for two
        options["maxnreg"] = REGISTERS
    _decode[(-(-heads * queries // tile.block_h), tile.splits, at.n)](
        absorbed, query, query.stride(0), cache, out, *workspace, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends,
        tile.splits, scale,
        HEADS=heads, NOPE=query.shape[2] - rotary, RANK=rank, ROTARY=rotary, PAGE=cache.shape[1], LINE=cache.shape[2],
        BLOCK_H=tile.block_h, BLOCK_N=tile.block_n, BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_P=max(16, triton.next_power_of_2(rotary)), OF_LINES=tile.of_lines, STAGES=tile.stages, ASKS=asks(cache, rank + rotary),
        VERIFY=queries > 1, num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
