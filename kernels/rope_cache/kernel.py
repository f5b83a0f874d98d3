"""After the qkv projection, in one pass: norm of query and key heads (if any), rotation, and the write to the paged cache.

    head = head / rms(head) * weight                                  (Qwen3; statistics in float32)
    (a, b) = halves of the first `rotary` dimensions
    (a, b) -> (a cos - b sin, b cos + a sin)                          (Su et al. 2021, halves as in Hugging Face)

One program a token and kv head: its query heads, its key head and its value head. A slot below 0 is padding: nothing is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(line, weight, table, at, inside, DIM, ROTARY, eps, NORM: tl.constexpr):
    """One head: `line` points at its first element. Returns the rotated head (float32 over `at`)."""
    half = ROTARY // 2
    partner = tl.where(at < half, at + half, at - half)
    turned = at < ROTARY
    own = tl.load(line + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + partner, mask=inside & turned, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(own * own, axis=0) / DIM + eps)
        dtype = line.dtype.element_ty
        own = (own * inverse * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        scale = tl.load(weight + partner, mask=inside & turned, other=0.0).to(tl.float32)
        other = (other * inverse * scale).to(dtype).to(tl.float32)
    angle = tl.where(at < half, at, at - half)
    cos = tl.load(table + angle, mask=inside & turned, other=1.0)
    sin = tl.load(table + half + angle, mask=inside & turned, other=0.0)
    sign = tl.where(at < half, -1.0, 1.0)
    return tl.where(turned, own * cos + sign * other * sin, own)


@triton.jit
def _rope_cache(
    qkv, positions, slots, table, q_weight, k_weight, query, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM)
    angles = table + tl.load(positions + token) * ROTARY
    for nth in tl.static_range(group):
        head = kv * group + nth
        turned = _turn(row + head * DIM, q_weight, angles, at, inside, DIM, ROTARY, eps, NORM)
        tl.store(query + (token * HEADS + head) * DIM + at, turned.to(query.dtype.element_ty), mask=inside)
    slot = tl.load(slots + token)
    if slot >= 0:
        to = (slot * KV_HEADS + kv) * DIM + at
        turned = _turn(row + (HEADS + kv) * DIM, k_weight, angles, at, inside, DIM, ROTARY, eps, NORM)
        tl.store(keys + to, turned.to(keys.dtype.element_ty), mask=inside)
        value = tl.load(row + (HEADS + KV_HEADS + kv) * DIM + at, mask=inside)
        tl.store(values + to, value.to(values.dtype.element_ty), mask=inside)


def rope_cache(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
) -> Tensor:
    """qkv [t, (heads + 2 kv_heads) d] -> query [t, heads, d]; keys and values [..., kv_heads, d] are written at `slots`.

    positions, slots int64 [t]; table float32 [max_len, rotary]: cosines, then sines; norms: weights [d] of query and key.
    """
    kv_heads, dim = keys.shape[-2:]
    tokens = qkv.shape[0]
    query = torch.empty(tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norms if norms else (table, table)
    _rope_cache[(tokens, kv_heads)](
        qkv, positions, slots, table, q_weight, k_weight, query, keys, values, eps,
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, ROTARY=table.shape[1],
        NORM=norms is not None, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return query
