"""Latent attention of one step's prompts among themselves, keys and values projected up: the left side of kernel.py's formula.

    k = (W_UK c, r) [nope + rotary],  v = W_UV c [wide]

A query and a key cost 2 (nope + rotary + wide) operations instead of 2 (2 rank + rotary), a third for DeepSeek. What the lines of
earlier steps give is where a tile's maximum, sum and output begin: `context` finds it a piece at a time, with the piece projected up,
or prefill.py, absorbed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.mla.prefill import tile_of
from meshlm.kernels.mla.tiles import PrefillTile, dense_tile


@triton.jit
def _dense_tile(
    q, q_rope, m, l, acc, first, last, nth_q, keys, values, rotated, before, head, scale,
    NOPE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This step's tokens first .. last - 1 of the request."""
    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        k = keys.load([before + begin, head * (NOPE + WIDE)])
        k_rope = rotated.load([before + begin, RANK])
        s = tl.dot(q, k.T)
        s = tl.dot(q_rope, k_rope.T, s) * (scale * 1.4426950408889634)
        if MASK:
            at = begin + tl.arange(0, BLOCK_N)
            # A row that sees nothing here sums nonsense, which its own key, in a later tile, fades to nothing.
            s = tl.where(at[None, :] <= nth_q[:, None], s, -1.0e30)
        top = tl.maximum(m, tl.max(s, axis=1))
        weights = tl.exp2(s - top[:, None])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(weights, axis=1)
        v = values.load([before + begin, head * (NOPE + WIDE) + NOPE])
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
        m = top
    return m, l, acc


@triton.jit(do_not_specialize=["n", "skip"])
def _dense(
    query, query_stride, keys, values, rotated, out, prior, sums, ends, n, skip, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PRIOR: tl.constexpr, SEARCH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    _, before, count, nth = tile_of(tile, n, skip, ends, BLOCK_Q, SEARCH)
    if (nth < 0) | (nth >= count):
        return
    nth_q, d, p, w = nth + tl.arange(0, BLOCK_Q), tl.arange(0, NOPE), tl.arange(0, ROTARY), tl.arange(0, WIDE)
    token, inside = (before + nth_q).to(tl.int64), (nth_q < count)[:, None]
    line = query + (token * query_stride + head * (NOPE + ROTARY))[:, None]
    q = tl.load(line + d[None, :], mask=inside, other=0.0)
    q_rope = tl.load(line + NOPE + p[None, :], mask=inside, other=0.0)
    m = tl.full((BLOCK_Q,), -1.0e30, tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, WIDE), tl.float32)
    if PRIOR:
        found = tl.load(sums + token * HEADS + head, mask=nth_q < count, other=float("-inf"))
        m = tl.maximum(m, found)
        l = tl.where(found == float("-inf"), 0.0, 1.0)
        acc = tl.load(prior + ((token * HEADS + head) * WIDE)[:, None] + w[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    whole = (nth + 1) // BLOCK_N * BLOCK_N
    m, l, acc = _dense_tile(
        q, q_rope, m, l, acc, 0, whole, nth_q, keys, values, rotated, before, head, scale, NOPE, WIDE, RANK, BLOCK_N, False, STAGES
    )  # fmt: skip
    m, l, acc = _dense_tile(
        q, q_rope, m, l, acc, whole, tl.minimum(nth + BLOCK_Q, count), nth_q, keys, values, rotated, before, head, scale,
        NOPE, WIDE, RANK, BLOCK_N, True, STAGES,
    )  # fmt: skip
    acc = acc / l[:, None]
    tl.store(out + ((token * HEADS + head) * WIDE)[:, None] + w[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "n"])
def _context(
    query, query_stride, keys, values, rotated, prior, sums, tokens, n, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, nth = tl.program_id(0), tl.program_id(1) * BLOCK_Q
    token = (nth + tl.arange(0, BLOCK_Q)).to(tl.int64)
    d, p, w, inside = tl.arange(0, NOPE), tl.arange(0, ROTARY), tl.arange(0, WIDE), (token < tokens)[:, None]
    line = query + (token * query_stride + head * (NOPE + ROTARY))[:, None]
    q = tl.load(line + d[None, :], mask=inside, other=0.0)
    q_rope = tl.load(line + NOPE + p[None, :], mask=inside, other=0.0)
    place = prior + ((token * HEADS + head) * WIDE)[:, None] + w[None, :]
    found = tl.load(sums + token * HEADS + head, mask=token < tokens, other=float("-inf"))
    m = tl.maximum(found, -1.0e30)
    l = tl.where(found == float("-inf"), 0.0, 1.0)
    acc = tl.load(place, mask=inside, other=0.0)
    whole = n // BLOCK_N * BLOCK_N
    last = tl.zeros((BLOCK_Q,), tl.int32) + n - 1
    m, l, acc = _dense_tile(
        q, q_rope, m, l, acc, 0, whole, last, keys, values, rotated, 0, head, scale, NOPE, WIDE, RANK, BLOCK_N, False, STAGES
    )  # fmt: skip
    m, l, acc = _dense_tile(
        q, q_rope, m, l, acc, whole, n, last, keys, values, rotated, 0, head, scale, NOPE, WIDE, RANK, BLOCK_N, True, STAGES
    )  # fmt: skip
    tl.store(place, acc / l[:, None], mask=inside)
    tl.store(sums + token * HEADS + head, m + tl.log2(l), mask=token < tokens)


def supported(query: Tensor, latent: Tensor, weight: Tensor, wide: int) -> bool:
    """Tiles come by bulk copies (TMA) of Hopper and later, which want powers of two and lines at multiples of 16 bytes.

    latent [t, rank + rotary]; weight [heads (nope + wide), rank]: what it is projected up by."""
    rotary = latent.shape[1] - weight.shape[1]
    nope, size = query.shape[2] - rotary, query.element_size()
    if any(width < 16 or width & (width - 1) for width in (nope, wide, rotary)):
        return False
    if latent.stride(0) * size % 16 or latent.data_ptr() % 16 or latent.shape[1] * size % 16:
        return False
    return not query.is_cuda or torch.cuda.get_device_capability(query.device) >= (9, 0)


def dense(
    query: Tensor, latent: Tensor, up: Tensor, at: Columns, scale: float, out: Tensor, skip: int = 0, *,
    prior: tuple[Tensor, Tensor] | None = None, tile: PrefillTile | None = None,
) -> None:  # fmt: skip
    """query [t, heads, nope + rotary], latent [t, rank + rotary] as cache.py leaves them, up [t, heads (nope + wide)].

    out [t, heads, wide].

    The first `skip` requests of the columns are left out. prior: what the context gives [t, heads, wide], and prefill.py's sums."""
    tokens, heads, dim = query.shape
    wide = out.shape[2]
    nope = up.shape[1] // heads - wide
    rotary = dim - nope
    tile = tile or dense_tile()

    tiles = _tiles(up, latent, (nope, wide, rotary), tile.block_n)
    _dense[(heads, (tokens - skip) // tile.rows + at.n - skip)](
        query, query.stride(0), *tiles, out, *(prior or (out, out)),
        at.ends, at.n, skip, scale,
        HEADS=heads, NOPE=nope, WIDE=wide, RANK=latent.shape[1] - rotary, ROTARY=rotary, BLOCK_Q=tile.rows,
        BLOCK_N=tile.block_n, PRIOR=prior is not None, SEARCH=256, STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def context(
    query: Tensor,
    lines: Tensor,
    up: Tensor,
    scale: float,
    prior: tuple[Tensor, Tensor],
    tile: PrefillTile | None = None,
) -> None:
    """Adds what one request's queries [t, heads, nope + rotary] see of some of its earlier tokens to what `prior` has so far.

    lines [n, rank + rotary] of the cache, up [n, heads (nope + wide)]; prior: float32 outputs [t, heads, wide], and logarithms (of
    base 2) of the sums [t, heads], minus infinity where nothing was seen yet."""
    tokens, heads, dim = query.shape
    wide = prior[0].shape[2]
    nope = up.shape[1] // heads - wide
    rotary, tile = dim - nope, tile or dense_tile()
    tiles = _tiles(up, lines, (nope, wide, rotary), tile.block_n)
    _context[(heads, -(-tokens // tile.rows))](
        query, query.stride(0), *tiles, *prior, tokens, lines.shape[0], scale,
        HEADS=heads, NOPE=nope, WIDE=wide, RANK=lines.shape[1] - rotary, ROTARY=rotary, BLOCK_Q=tile.rows,
        BLOCK_N=tile.block_n, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tiles(up: Tensor, lines: Tensor, widths: tuple[int, int, int], block_n: int) -> tuple[TensorDescriptor, ...]:
    """Descriptors of the tiles of keys, values and rotated keys, whose widths these are."""

    def of(x: Tensor, width: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [block_n, width])

    nope, wide, rotary = widths
    return of(up, nope), of(up, wide), of(lines, rotary)
