"""Paged attention in plain torch: correct everywhere, and quick on the CPU.

    out = softmax(q k^T * scale [soft cap] + mask) v        (Vaswani et al. 2017, section 3.2.1)

Decodes are one batched product over gathered blocks, without a Python loop over requests; prompt chunks go one by one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.workers.attention.rotated import RotatedAttention
from meshlm.workers.batch import LayerCache, StepInputs


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """query [n, heads, t, d] over keys, values [n, heads, context, d]; mask: which of them count, None: causal, with t = context."""
    if not softcap:
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None, scale=scale)
    if mask is None:
        mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = softcap * torch.tanh(query @ keys.transpose(-2, -1) * (scale / softcap))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(values.dtype) @ values


class TorchAttention(RotatedAttention):
    """Made once per step: masks and gather indices are the same for all layers with the same window."""

    def __init__(self, batch: StepInputs, block_size: int) -> None:
        self._batch, self._block_size = batch, block_size
        self._decode_masks: dict[int, Tensor | None] = {}
        self._chunk_masks: dict[tuple[int, int], Tensor | None] = {}
        assert batch.lens is not None
        self._lens = batch.lens
        blocks = -(-batch.lens.max_decode_len // block_size)
        self._decode_blocks = batch.block_tables[: batch.num_decodes, :blocks]

    def run(
        self, query: Tensor, cache: LayerCache, scale: float, sliding_window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        """See `RotatedAttention.run`."""
        batch = self._batch
        parts = []
        if batch.num_decodes:
            parts.append(self._decode(query[: batch.num_decodes], cache, scale, sliding_window, softcap))
        begin = batch.num_decodes
        for index, count in enumerate(self._lens.query_lens):
            parts.append(self._chunk(index, query[begin : begin + count], cache, scale, sliding_window, softcap))
            begin += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, query: Tensor, cache: LayerCache, scale: float, window: int, softcap: float) -> Tensor:
        n, num_heads, head_dim = query.shape
        kv_heads = cache.keys.shape[2]
        # [n, blocks, block_size, kv_heads, d] -> [n, kv_heads, context, d]
        keys = cache.keys[self._decode_blocks].flatten(1, 2).transpose(1, 2)
        values = cache.values[self._decode_blocks].flatten(1, 2).transpose(1, 2)
        grouped = query.view(n, kv_heads, num_heads // kv_heads, head_dim)  # a group of heads shares its keys
        out = _attention(grouped, keys, values, self._decode_mask(window), scale, softcap)
        return out.reshape(n, num_heads, head_dim)

    def _decode_mask(self, window: int) -> Tensor | None:
        """bool [n, 1, 1, context]: which gathered positions count."""
        if window not in self._decode_masks:
            lens = self._lens.seq_lens[: self._batch.num_decodes, None]
            at = torch.arange(self._decode_blocks.shape[1] * self._block_size, device=lens.device)
            mask = at < lens
            if window:
                mask &= at >= lens - window
            self._decode_masks[window] = mask[:, None, None, :]
        return self._decode_masks[window]

    def _chunk(self, index: int, query: Tensor, cache: LayerCache, scale: float, window: int, softcap: float) -> Tensor:
        context, count = self._lens.context_lens[index], query.shape[0]
        blocks = self._batch.block_tables[self._batch.num_decodes + index, : -(-context // self._block_size)]
        groups = query.shape[1] // cache.keys.shape[2]
        keys = cache.keys[blocks].flatten(0, 1)[:context].repeat_interleave(groups, 1)
        values = cache.values[blocks].flatten(0, 1)[:context].repeat_interleave(groups, 1)
        mask = self._chunk_mask(count, context, window, query.device)
        query, keys, values = (heads.transpose(0, 1)[None] for heads in (query, keys, values))
        out = _attention(query, keys, values, mask, scale, softcap)
        return out[0].transpose(0, 1)

    def _chunk_mask(self, count: int, context: int, window: int, device: torch.device) -> Tensor | None:
        """bool [count, context], or None for a whole prompt under plain causality."""
        if count == context and (not window or context <= window):
            return None
        key = (count * (1 << 32) + context, window)
        if key not in self._chunk_masks:
            at = torch.arange(context, device=device)
            row = torch.arange(context - count, context, device=device)[:, None]
            mask = at <= row
            if window:
                mask &= at > row - window
            self._chunk_masks[key] = mask
        return self._chunk_masks[key]
