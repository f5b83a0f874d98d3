"""Latent attention of a step of few decodes: what stands before and behind decode.py's kernel, in one launch each.

    absorb_cache    cache.py, and W_UK^T q of each head
    combine_values  what decode.py's splits found, put together, and W_UV times that

With one row such products are read once and wait for memory, and a launch costs as much as they do. Programs have their part of the
weight before they wait for the kernel before this one (kernels/pdl.py).
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.mla.decode import share, split_decode
from meshlm.kernels.mla.tiles import DecodeTile

ROWS = 4  # at most; each reads the weights again
COLUMNS = 128  # of a latent, that a program computes
VALUES = 32  # of a head, that a program computes
AT_ONCE = 8  # splits


@triton.jit
def _absorb_cache(
    query, query_stride, latent, latent_stride, positions, slots, table, weight, up, cache, absorbed, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (RANK + COLUMNS - 1) // COLUMNS
    token, head, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    p = tl.arange(0, BLOCK_P)
    angles = table + tl.load(positions + token) * ROTARY + p // 2
    cos = tl.load(angles, mask=p < ROTARY, other=1.0)
    sin = tl.load(angles + ROTARY // 2, mask=p < ROTARY, other=0.0) * tl.where(p % 2 == 0, -1.0, 1.0)
    if head < HEADS:
        k, r = tl.arange(0, BLOCK_K), chunk * COLUMNS + tl.arange(0, COLUMNS)
        into = up + (head * (NOPE + WIDE) + k).to(tl.int64)[:, None] * RANK + r[None, :]
        w = tl.load(into, mask=(k < NOPE)[:, None] & (r < RANK)[None, :], other=0.0).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
        line = query + token * query_stride + head * (NOPE + ROTARY)
        q = tl.load(line + k, mask=k < NOPE, other=0.0).to(tl.float32)
        found = tl.sum(q[:, None] * w, axis=0)
        tl.store(absorbed + (token * HEADS + head) * RANK + r, found.to(absorbed.dtype.element_ty), mask=r < RANK)
        if chunk == 0:
            own = tl.load(line + NOPE + p, mask=p < ROTARY, other=0.0).to(tl.float32)
            other = tl.load(line + NOPE + (p ^ 1), mask=p < ROTARY, other=0.0).to(tl.float32)
            tl.debug_barrier()  # all have read
            tl.store(line + NOPE + p, (own * cos + other * sin).to(query.dtype.element_ty), mask=p < ROTARY)
    else:
        l = tl.arange(0, BLOCK_R)
        scale = tl.load(weight + l, mask=l < RANK, other=0.0).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
        slot = tl.load(slots + token)
        line = latent + token * latent_stride
        c = tl.load(line + l, mask=l < RANK, other=0.0).to(tl.float32)
        c = c * tl.rsqrt(tl.sum(c * c, axis=0) / RANK + eps) * scale
        own = tl.load(line + RANK + p, mask=p < ROTARY, other=0.0).to(tl.float32)
        other = tl.load(line + RANK + (p ^ 1), mask=p < ROTARY, other=0.0).to(tl.float32)
        if slot >= 0:
            to = cache + slot * (RANK + ROTARY)
            tl.store(to + l, c.to(cache.dtype.element_ty), mask=l < RANK)
            rotated = (own * cos + other * sin).to(cache.dtype.element_ty)
            tl.store(to + RANK + p, rotated, mask=p < ROTARY)


@triton.jit(do_not_specialize=["splits"])
def _combine_values(
    out, found, parts, sums, up, blocks, blocks_stride, rows, starts, ends, splits,
    HEADS: tl.constexpr, NOPE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, AT_ONCE: tl.constexpr, MOST: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, chunk, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before, count, _, _, _, used = share(request, 0, rows, starts, ends, blocks, blocks_stride, splits, BLOCK_N)
    v, r = chunk * VALUES + tl.arange(0, VALUES), tl.arange(0, BLOCK_R)
    behind = up + (head * (NOPE + WIDE) + NOPE + v).to(tl.int64)[:, None] * RANK + r[None, :]
    w = tl.load(behind, mask=(v < WIDE)[:, None] & (r < RANK)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count != 1:
        return
    line = before.to(tl.int64) * HEADS + head
    if used == 1:
        latent = tl.load(found + line * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)
    else:
        base = (request.to(tl.int64) * HEADS + head) * splits
        s = tl.arange(0, MOST)
        top = tl.max(tl.load(sums + (base + s) * 2, mask=s < used, other=float("-inf")), axis=0)
        latent = tl.zeros((BLOCK_R,), tl.float32)
        total = 0.0
        for begin in range(0, used, AT_ONCE):
            nth = begin + tl.arange(0, AT_ONCE)
            weights = tl.exp2(tl.load(sums + (base + nth) * 2, mask=nth < used, other=float("-inf")) - top)
            total += tl.sum(tl.load(sums + (base + nth) * 2 + 1, mask=nth < used, other=0.0) * weights, axis=0)
            inside = (nth < used)[:, None] & (r < RANK)[None, :]
            part = tl.load(parts + (base + nth)[:, None] * RANK + r[None, :], mask=inside, other=0.0)
            latent += tl.sum(part * weights[:, None], axis=0)
        latent = latent / total
    latent = latent.to(up.dtype.element_ty).to(tl.float32)  # as decode.py rounds it
    values = tl.sum(w.to(tl.float32) * latent[None, :], axis=1)
    tl.store(out + line * WIDE + v, values.to(out.dtype.element_ty), mask=v < WIDE)


def absorb_cache(
    query: Tensor, latent: Tensor, positions: Tensor, slots: Tensor, table: Tensor, norm: tuple[Tensor, float],
    up: Tensor, cache: Tensor, wide: int,
) -> Tensor:  # fmt: skip
    """As cache.py's latent_cache, but the latent stays as it is; and absorbed queries [t, heads, rank].

    up [heads (nope + wide), rank]: what latents are projected up by."""
    tokens, heads, dim = query.shape
    rotary, rank = table.shape[1], up.shape[1]
    absorbed = query.new_empty(tokens, heads, rank)
    _absorb_cache[(heads * -(-rank // COLUMNS) + 1, tokens)](
        query, query.stride(0), latent, latent.stride(0), positions, slots, table, norm[0], up, cache, absorbed, norm[1],
        HEADS=heads, NOPE=dim - rotary, WIDE=wide, RANK=rank, ROTARY=rotary, COLUMNS=COLUMNS,
        BLOCK_K=triton.next_power_of_2(dim - rotary), BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_P=triton.next_power_of_2(rotary), num_warps=4, **pdl.options(query),
    )  # fmt: skip
    return absorbed


def decode_values(
    absorbed: Tensor, query: Tensor, cache: Tensor, at: Columns, scale: float, up: Tensor, out: Tensor,
    workspace: tuple[Tensor, Tensor], tile: DecodeTile,
) -> None:  # fmt: skip
    """As decode.py's decode, and the values of what it finds: out [>= n, heads, wide], contiguous."""
    heads, rank = absorbed.shape[1:]
    wide, found = out.shape[2], absorbed  # a program that is alone has read its queries when it writes
    split_decode(absorbed, query, cache, at, scale, found, workspace, tile)
    _combine_values[(heads, -(-wide // VALUES), at.n)](
        out, found, *workspace, up, at.blocks, at.blocks.stride(0), at.rows, at.starts, at.ends, tile.splits,
        HEADS=heads, NOPE=up.shape[0] // heads - wide, WIDE=wide, RANK=rank, BLOCK_N=tile.block_n, VALUES=VALUES,
        AT_ONCE=AT_ONCE, MOST=triton.next_power_of_2(tile.splits), BLOCK_R=triton.next_power_of_2(rank),
        num_warps=4, **pdl.options(query),
    )  # fmt: skip
