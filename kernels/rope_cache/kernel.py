"""After the qkv projection, in one pass: norm of query and key heads (if any), rotation, and the write to the paged cache.

    head = head / rms(head) * weight                                  (Qwen3; statistics in float32)
    (a, b) = halves of the first `rotary` dimensions
    (a, b) -> (a cos - b sin, b cos + a sin)                          (Su et al. 2021, halves as in Hugging Face)

One program a token and kv head, its query heads, key head and value head being the rows of one tile. A slot below 0 is padding:
no cache is written, and its value becomes zeros: kernels/attention reads tiles that begin in a prompt and end in padding, whose lines
may hold anything (nobody computes attention there), and a weight of zero does not make nothing of a NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import float8
from meshlm.kernels.fp8 import within


@triton.jit
def _rope_cache(
    qkv, positions, slots, table, q_weight, k_weight, query, keys, values, eps, k_scale, v_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    half: tl.constexpr = ROTARY // 2
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)  # rows: group query heads, the key head
    is_query, is_key = r < group, r == group
    head = tl.where(is_query, kv * group + r, HEADS + kv)
    inside = (is_query | is_key)[:, None] & (d < DIM)[None, :]
    turned = (d < ROTARY)[None, :]
    partner = tl.where(d < half, d + half, d - half)
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM)
    own = tl.load(row + head[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + head[:, None] * DIM + partner[None, :], mask=inside & turned, other=0.0).to(tl.float32)
    value = tl.load(row + (HEADS + KV_HEADS + kv) * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
    if NORM:
        dtype = query.dtype.element_ty
        inverse = tl.rsqrt(tl.sum(own * own, axis=1) / DIM + eps)[:, None]
        q_w = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        k_w = tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        own = (own * inverse * tl.where(is_key[:, None], k_w[None, :], q_w[None, :])).to(dtype).to(tl.float32)
        q_w = tl.load(q_weight + partner, mask=d < ROTARY, other=0.0).to(tl.float32)
        k_w = tl.load(k_weight + partner, mask=d < ROTARY, other=0.0).to(tl.float32)
        other = (other * inverse * tl.where(is_key[:, None], k_w[None, :], q_w[None, :])).to(dtype).to(tl.float32)
    angles = table + tl.load(positions + token) * ROTARY
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(angles + angle, mask=d < ROTARY, other=1.0)
    sin = tl.load(angles + half + angle, mask=d < ROTARY, other=0.0) * tl.where(d < half, -1.0, 1.0)
    own = own * cos[None, :] + tl.where(turned, other * sin[None, :], 0.0)
    to = query + (token * HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(to, own.to(query.dtype.element_ty), mask=is_query[:, None] & inside)
    tl.debug_barrier()  # all have read
    tl.store(row + head[:, None] * DIM + d[None, :], own.to(query.dtype.element_ty), mask=is_key[:, None] & inside)
    slot = tl.load(slots + token)
    if slot >= 0:
        if FP8 > 0:
            own = within(own, k_scale, FP8)
            value = within(value, v_scale, FP8)
        place = (slot * KV_HEADS + kv) * DIM + d
        tl.store(keys + place[None, :] + (r * 0)[:, None], own.to(keys.dtype.element_ty), mask=is_key[:, None] & inside)
        tl.store(values + place, value.to(values.dtype.element_ty), mask=d < DIM)
    else:
        nothing = tl.zeros((BLOCK,), tl.float32).to(qkv.dtype.element_ty)
        tl.store(row + (HEADS + KV_HEADS + kv) * DIM + d, nothing, mask=d < DIM)


def rope_cache(
    qkv: Tensor, positions: Tensor, slots: Tensor, table: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    keys: Tensor, values: Tensor, num_heads: int, k_scale: float = 1.0, v_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """qkv [t, (heads + 2 kv_heads) d] -> query [t, heads, d]; keys and values [..., kv_heads, d] are written at `slots`.

    The keys in qkv are normed and rotated in place too, and values of padding zeroed, for kernels/attention.
    positions, slots int64 [t]; table float32 [max_len, rotary]: cosines, then sines; norms: weights [d] of query and key.
    The scales are those of an FP8 cache."""
    kv_heads, dim = keys.shape[-2:]
    tokens = qkv.shape[0]
    query = torch.empty(tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norms if norms else (table, table)
    _rope_cache[(tokens, kv_heads)](
        qkv, positions, slots, table, q_weight, k_weight, query, keys, values, eps, k_scale, v_scale,
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, ROTARY=table.shape[1],
        NORM=norms is not None, FP8=float8.largest(keys.dtype), ROWS=triton.next_power_of_2(num_heads // kv_heads + 1),
        BLOCK=triton.next_power_of_2(dim), num_warps=1 if dim <= 256 else 4,
    )  # fmt: skip
    return query
