"""Paged attention in plain torch: correct everywhere, and quick on the CPU.

    out = softmax(q k^T * scale [soft cap] + mask) v        (Vaswani et al. 2017, section 3.2.1)

Decodes are one batched product over gathered tokens, without a Python loop over requests; prompt chunks go one by one. Only tokens that
a query sees are gathered: others' blocks may hold anything, and a weight of zero does not make nothing of a NaN.
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
    """Made once per step: masks and gather indices are the same for all layers of a group with the same window."""

    def __init__(self, batch: StepInputs, block_size: int) -> None:
        super().__init__(batch, block_size)
        self._decode_places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._chunk_masks: dict[tuple[int, int], Tensor | None] = {}
        assert batch.lens is not None
        self._lens = batch.lens

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
        slots, mask = self._decoded(cache.group, window)
        # [n, context, kv_heads, d] -> [n, kv_heads, context, d]
        keys, values = (lines.transpose(1, 2) for lines in cache.read(slots, query.dtype))
        grouped = query.view(n, kv_heads, num_heads // kv_heads, head_dim)  # a group of heads shares its keys
        out = _attention(grouped, keys, values, mask, scale, softcap)
        return out.reshape(n, num_heads, head_dim)

    def _decoded(self, group: int, window: int) -> tuple[Tensor, Tensor]:
        """Slots [n, context] of what the decodes see, and which count: bool [n, 1, 1, context]; the others name the last token."""
        key = (group, window)
        if key not in self._decode_places:
            size, n = self._block_size, self._batch.num_decodes
            lens = self._lens.seq_lens[:n, None]
            context = -(-self._lens.max_decode_len // size) * size
            at = torch.arange(min(context, window or context), device=lens.device)
            if window:
                at = at + (lens - window).clamp(min=0)
            mask, at = at < lens, at.minimum(lens - 1)
            slots = self._batch.block_tables[group][:n].gather(1, at // size) * size + at % size
            self._decode_places[key] = slots, mask[:, None, None, :]
        return self._decode_places[key]

    def _chunk(self, index: int, query: Tensor, cache: LayerCache, scale: float, window: int, softcap: float) -> Tensor:
        context, count, size = self._lens.context_lens[index], query.shape[0], self._block_size
        first = max(0, context - count - window + 1) // size if window else 0  # block that is seen
        table = self._batch.block_tables[cache.group][self._batch.num_decodes + index]
        blocks, seen = table[first : -(-context // size)], context - first * size
        groups = query.shape[1] // cache.keys.shape[2]
        keys, values = (
            pages.flatten(0, 1)[:seen].repeat_interleave(groups, 1)
            for pages in cache.read(blocks, query.dtype, blocks=True)
        )
        mask = self._chunk_mask(count, seen, window, query.device)
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
