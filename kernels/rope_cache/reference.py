"""The reference of rope_cache/kernel.py, in plain torch."""

import torch
from torch import Tensor

from meshlm.kernels import float8
from meshlm.kernels.norm.reference import rms_norm


def rope_cache(
    qkv: Tensor, positions: Tensor, slots: Tensor, table: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    keys: Tensor, values: Tensor, num_heads: int, k_scale: float = 1.0, v_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    kv_heads, dim = keys.shape[-2:]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * kv_heads, dim)
    query, key, value = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query = rms_norm(query, norms[0], eps)
        key[:] = rms_norm(key, norms[1], eps)
    angles = table[positions]
    half = table.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]

    def turn(x: Tensor) -> Tensor:
        a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :].float()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)

    written = slots >= 0
    value[~written] = 0.0
    query = turn(query)
    key[:] = turn(key)
    for cache, lines, scale in ((keys, key, k_scale), (values, value, v_scale)):
        kept = float8.stored(lines[written], scale, cache.dtype)
        float8.as_bytes(cache).view(-1, kv_heads, dim)[slots[written]] = float8.as_bytes(kept)
    return query
