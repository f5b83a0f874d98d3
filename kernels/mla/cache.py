"""Before latent attention, in one pass: norm of the latent, rotation of key and query heads, and the write to the paged cache.

    c = c / rms(c) * weight                                               (statistics in float32)
    (a, b) = neighbours (x_2i, x_2i+1) -> (a cos_i - b sin_i, b cos_i + a sin_i)     (Su et al. 2021; DeepSeek rotates neighbours)

One program a token. Latent, key and the rotated parts of the queries are changed in place too: what is projected up from this step's
own tokens reads them there. A slot below 0 is padding: nothing is written to the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit
def _write(
    query, query_stride, latent, latent_stride, positions, slots, table, weight, cache, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, LINE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    r, p, h = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_H)
    angles = table + tl.load(positions + token) * ROTARY + p // 2
    cos = tl.load(angles, mask=p < ROTARY, other=1.0)
    sin = tl.load(angles + ROTARY // 2, mask=p < ROTARY, other=0.0) * tl.where(p % 2 == 0, -1.0, 1.0)
    line = latent + token * latent_stride
    dtype = cache.dtype.element_ty
    c = tl.load(line + r, mask=r < RANK, other=0.0).to(tl.float32)
    w = tl.load(weight + r, mask=r < RANK, other=0.0).to(tl.float32)
    c = (c * tl.rsqrt(tl.sum(c * c, axis=0) / RANK + eps) * w).to(dtype)
    k = tl.load(line + RANK + p, mask=p < ROTARY, other=0.0).to(tl.float32)
    k_other = tl.load(line + RANK + (p ^ 1), mask=p < ROTARY, other=0.0).to(tl.float32)
    k = (k * cos + k_other * sin).to(dtype)
    inside = (h < HEADS)[:, None] & (p < ROTARY)[None, :]
    heads = query + token * query_stride + (h * (NOPE + ROTARY) + NOPE)[:, None]
    q = tl.load(heads + p[None, :], mask=inside, other=0.0).to(tl.float32)
    q_other = tl.load(heads + (p ^ 1)[None, :], mask=inside, other=0.0).to(tl.float32)
    q = q * cos[None, :] + q_other * sin[None, :]
    tl.debug_barrier()  # all have read
    tl.store(heads + p[None, :], q.to(query.dtype.element_ty), mask=inside)
    tl.store(line + r, c, mask=r < RANK)
    tl.store(line + RANK + p, k, mask=p < ROTARY)
    slot = tl.load(slots + token)
    if slot >= 0:
        to = cache + slot * LINE
        tl.store(to + r, c, mask=r < RANK)
        tl.store(to + RANK + p, k, mask=p < ROTARY)


def latent_cache(
    query: Tensor, latent: Tensor, positions: Tensor, slots: Tensor, table: Tensor, norm: tuple[Tensor, float],
    cache: Tensor,
) -> None:  # fmt: skip
    """query [t, heads, nope + rotary], latent [t, rank + rotary] are changed in place; their lines may be strided.

    positions, slots int64 [t]; table float32 [max_len, rotary]: cosines, then sines; norm: weight [rank] and eps;
    cache [blocks, page, rank + rotary]; what stands behind that in a line stays as it is."""
    tokens, heads, dim = query.shape
    rotary = table.shape[1]
    rank = latent.shape[1] - rotary
    _write[(tokens,)](
        query, query.stride(0), latent, latent.stride(0), positions, slots, table, norm[0], cache, norm[1],
        HEADS=heads, NOPE=dim - rotary, RANK=rank, ROTARY=rotary, LINE=cache.shape[2], BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_R=triton.next_power_of_2(rank), BLOCK_P=triton.next_power_of_2(rotary), num_warps=4, **pdl.options(cache),
    )  # fmt: skip
