"""The reference of attention/prefill.py and attention/decode.py, in plain torch and float32."""

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras


def attention(query: Tensor, keys: Tensor, values: Tensor, at: Columns, scale: float, extras: Extras = PLAIN) -> Tensor:
    """Attention of all requests of the columns, one after the other: query [t, heads, d] -> float32 [t, heads, d]."""
    _, page, kv_heads, dim = keys.shape
    group = query.shape[1] // kv_heads
    out = torch.zeros(query.shape, device=query.device)
    begin = 0
    for row, start, end in zip(
        at.rows[: at.n].tolist(), at.starts[: at.n].tolist(), at.ends[: at.n].tolist(), strict=True
    ):
        count = end - begin
        length = start + count
        table = at.blocks[row, : -(-length // page)].long()
        k = keys[table].float().reshape(-1, kv_heads, dim)[:length].repeat_interleave(group, 1) * extras.k_scale
        v = values[table].float().reshape(-1, kv_heads, dim)[:length].repeat_interleave(group, 1) * extras.v_scale
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k) * scale
        if extras.cap:
            scores = extras.cap * torch.tanh(scores / extras.cap)
        place = torch.arange(length, device=query.device)
        own = torch.arange(start, length, device=query.device)[:, None]
        if extras.slopes is not None:
            scores += extras.slopes[:, None, None] * (place - own)
        seen = place <= own
        if extras.window:
            seen &= place > own - extras.window
        if extras.chunk:
            seen &= place >= own // extras.chunk * extras.chunk
        scores = scores.masked_fill(~seen, -torch.inf)
        if extras.sinks is not None:
            sink = extras.sinks.float()[:, None, None].expand(-1, count, 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
        begin = end
    return out
