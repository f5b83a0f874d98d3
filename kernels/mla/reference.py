"""The reference of kernels/mla, in plain torch; attention in float32."""

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.norm.reference import rms_norm


def latent_cache(
    query: Tensor, latent: Tensor, positions: Tensor, slots: Tensor, table: Tensor, norm: tuple[Tensor, float],
    cache: Tensor,
) -> None:  # fmt: skip
    """Rotates query and latent, norms the latent, and writes it to the slots that are not negative, all in place."""
    rotary = table.shape[1]
    angles = table[positions]
    cos, sin = angles[:, : rotary // 2], angles[:, rotary // 2 :]

    def turn(x: Tensor) -> Tensor:
        """[t, heads, rotary]"""
        a, b = x[..., ::2].float(), x[..., 1::2].float()
        c, s = cos[:, None], sin[:, None]
        return torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2).to(x.dtype)

    query[..., -rotary:] = turn(query[..., -rotary:])
    latent[:, -rotary:] = turn(latent[:, None, -rotary:])[:, 0]
    latent[:, :-rotary] = rms_norm(latent[:, :-rotary], *norm)
    written = slots >= 0
    cache.view(-1, cache.shape[2])[slots[written], : latent.shape[1]] = latent[written]


def absorbed_attention(
    absorbed: Tensor, rotated: Tensor, cache: Tensor, at: Columns, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of all requests of the columns: absorbed [t, heads, rank], rotated [t, heads, rotary] -> float32 [t, heads, rank].

    And the logarithm (of base e) of the sum of each softmax [t, heads]."""
    page, width = cache.shape[1:]
    rank = absorbed.shape[2]
    query = torch.cat((absorbed, rotated), dim=-1).float()
    out, sums = torch.zeros(absorbed.shape, device=query.device), torch.zeros(absorbed.shape[:2], device=query.device)
    begin = 0
    for row, start, end in zip(
        at.rows[: at.n].tolist(), at.starts[: at.n].tolist(), at.ends[: at.n].tolist(), strict=True
    ):
        length = start + end - begin
        table = at.blocks[row, : -(-length // page)].long()
        lines = cache[table].float().reshape(-1, width)[:length]
        scores = torch.einsum("qhd,kd->hqk", query[begin:end], lines) * scale
        own = torch.arange(start, length, device=query.device)[:, None]
        scores = scores.masked_fill(torch.arange(length, device=query.device) > own, -torch.inf)
        out[begin:end] = torch.einsum("hqk,kr->qhr", scores.softmax(-1), lines[:, :rank])
        sums[begin:end] = scores.logsumexp(-1).T
        begin = end
    return out, sums
