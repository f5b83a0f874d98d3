"""Whether the kernels that write and read a cache of 8-bit floats do so on this very GPU: small cases against plain torch.

Asked by a worker's start for types that not every GPU and compiler has been seen to convert (e5m2).
"""

from typing import NamedTuple

import torch

from meshlm.kernels import float8
from meshlm.kernels.attention.decode import decode
from meshlm.kernels.attention.kernel import Columns, Extras
from meshlm.kernels.attention.prefill import prefill
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.rope_cache import reference
from meshlm.kernels.rope_cache.kernel import rope_cache

REQUESTS = ((0, 20), (33, 7), (40, 1), (5, 1))  # start, count; the last two are decodes
NEAR = 0.02  # of norms
WRITTEN = 0.98  # of the numbers that are written are the reference's, at least: others may be its neighbours
EXTRAS = Extras(k_scale=0.5, v_scale=0.25)


class CacheShape(NamedTuple):
    """The heads of a model's layers, and the cache that they have."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype  # of the cache


def prove_cache(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernels must not be used for such a cache; "" when they may be. dtype: of the model."""
    heads, kv_heads, dim, page, kind = shape
    random = torch.Generator(device).manual_seed(2)
    counts = torch.tensor([count for _, count in REQUESTS], device=device)
    starts = torch.tensor([start for start, _ in REQUESTS], dtype=torch.int32, device=device)
    blocks = -(-64 // page)
    tables = torch.arange(len(REQUESTS) * blocks, dtype=torch.int32, device=device).view(len(REQUESTS), blocks)
    rows = torch.arange(len(REQUESTS), dtype=torch.int32, device=device)
    at = Columns(rows, starts, counts.cumsum(0).int(), len(REQUESTS), tables)
    of_token = rows.long().repeat_interleave(counts)
    firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    positions = starts.long()[of_token] + torch.arange(len(of_token), device=device) - firsts
    slots = tables[of_token, positions // page].long() * page + positions % page
    angles = torch.outer(torch.arange(64.0, device=device), 1e-4 ** (torch.arange(0, dim, 2, device=device) / dim))
    table = torch.cat((angles.cos(), angles.sin()), 1)
    lines = torch.randn(2, tables.numel(), page, kv_heads, dim, generator=random, device=device)
    keys, values = (float8.stored(cache, 1.0, kind) for cache in lines)
    qkv = torch.randn(len(of_token), (heads + 2 * kv_heads) * dim, generator=random, device=device).to(dtype)
    qkv[3] *= 4000  # more than e4m3 holds, and than e5m2 holds divided by the scale of values
    wanted = keys.clone(), values.clone()
    scales = EXTRAS.k_scale, EXTRAS.v_scale
    reference.rope_cache(qkv.clone(), positions, slots, table, None, 0.0, *wanted, heads, *scales)
    query = rope_cache(qkv, positions, slots, table, None, 0.0, keys, values, heads, *scales)
    for cache, right in zip((keys, values), wanted, strict=True):
        if float((float8.as_bytes(cache) == float8.as_bytes(right)).float().mean()) < WRITTEN:
            return f"what is written to a cache of {kind} is not what must be"
    query[3] = 0  # its scores would be infinite
    out, scale = torch.zeros_like(query), dim**-0.5
    workspace = (
        torch.empty(len(REQUESTS) * heads * (dim + 2), device=device),
        torch.empty(len(REQUESTS) * heads * 2, device=device),
        torch.zeros(len(REQUESTS) * kv_heads, dtype=torch.int32, device=device),
    )
    prefill(query, keys, values, at, scale, out, extras=EXTRAS, fewest=2)
    decode(query, keys, values, at, scale, out, workspace, 1, EXTRAS)
    right = attention(query, keys, values, at, scale, EXTRAS)
    error = float((out.float() - right).norm() / right.norm())
    return "" if error <= NEAR else f"attention over a cache of {kind} is {error:.3g} of the norm away"
