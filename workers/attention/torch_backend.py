"""Paged attention in plain torch: correct everywhere, and quick on the CPU. Queries and keys are rotated and stored before it.

    out = softmax(q k^T * scale [soft cap] + mask [, sink]) v        (Vaswani et al. 2017, section 3.2.1)

Decodes are one batched product over gathered tokens, without a Python loop over requests; prompt chunks go one by one. Only tokens that
a query sees are gathered: others' blocks may hold anything, and a weight of zero does not make nothing of a NaN.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.attention.seen import Seen
from meshlm.workers.attention.sparse_latent import Choice, Chosen, ToChoose, attend_choice, choose
from meshlm.workers.batch import CrossCache, LayerCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.states.torch_states import TorchStates


class RotatedAttention(ABC):
    def __init__(self, batch: StepInputs, block_size: int) -> None:
        self._batch, self._block_size = batch, block_size
        self._states: dict[int, TorchStates] = {}
        self._choice: Choice | None = None  # of the last index

    def states(self, group: int) -> TorchStates:
        found = self._states.get(group)
        if found is None:
            found = self._states[group] = TorchStates(self._batch, group, self._block_size)
        return found

    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        query = step.ops.rope_cache(qkv, step.batch, step.table, step.cache, heads)
        seen = Seen(scale, sliding_window, heads.softcap, heads.chunk, heads.sinks, heads.slopes)
        return self.run(query, step.cache, seen)

    def attend_latent(
        self, query: Tensor, latent: Tensor, step: LayerStep, heads: LatentShape, scale: float, chosen: ToChoose = None
    ) -> Tensor:
        """Absorbed: all heads over one, whose keys are the cache's lines, and whose values are the latents in them."""
        ops, batch, table, cache = step
        ops.latent_cache(query, latent, batch, table, cache, heads)
        absorbed = torch.cat((heads.absorb(query), query[..., heads.nope :]), dim=-1)
        if chosen is not None:
            if isinstance(chosen, Chosen):
                behind = cache.keys.flatten(0, 1)[..., latent.shape[1] :]
                behind.index_copy_(0, batch.slot_mapping[cache.group], chosen.key[:, None])
                self._choice = choose(chosen, cache, batch)
            assert self._choice is not None
            return heads.values(attend_choice(absorbed, self._choice, cache, heads.rank, scale))
        return heads.values(self.run(absorbed, cache, Seen(scale))[..., : heads.rank])

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        """In plain torch, one request after the other, over its page as it lies there."""
        batch, length = self._batch, cache.length
        assert batch.lens is not None
        counts = [1] * batch.num_decodes + list(batch.lens.query_lens)
        out, begin = torch.empty_like(query), 0
        for page, count in zip(batch.block_tables[cache.group][:, 0].tolist(), counts, strict=True):
            lines = query[begin : begin + count], cache.keys[page, :length], cache.values[page, :length]
            q, k, v = (one.transpose(0, 1)[None] for one in lines)
            found = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
            out[begin : begin + count] = found[0].transpose(0, 1)
            begin += count
        return out

    @abstractmethod
    def run(self, query: Tensor, cache: LayerCache, seen: Seen) -> Tensor:
        """query [t, q_heads, head_dim] -> [t, q_heads, head_dim]. This step's keys and values are in the cache."""


def attention_of(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    seen: Seen,
    *,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """query [n, heads, t, d] over keys, values [n, heads, context, d]; mask: which of them count, None: causal, with t = context.
    sinks: [heads, t or 1, 1]. bias: of scores, [n, heads, t, context] or what can be expanded to it."""
    if not seen.softcap and sinks is None and bias is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None, scale=seen.scale)
    if mask is None:
        mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = query @ keys.transpose(-2, -1) * seen.scale
    if seen.softcap:
        scores = seen.softcap * torch.tanh(scores / seen.softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


class TorchAttention(RotatedAttention):
    """Made once per step: masks and gather indices are the same for all layers of a group that see the same."""

    def __init__(self, batch: StepInputs, block_size: int) -> None:
        super().__init__(batch, block_size)
        self._decode_places: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._chunk_masks: dict[tuple[int, int, int, int], Tensor | None] = {}
        assert batch.lens is not None
        self._lens = batch.lens

    def run(self, query: Tensor, cache: LayerCache, seen: Seen) -> Tensor:
        batch = self._batch
        parts = []
        if batch.num_decodes:
            parts.append(self._decode(query[: batch.num_decodes], cache, seen))
        begin = batch.num_decodes
        for index, count in enumerate(self._lens.query_lens):
            parts.append(self._chunk(index, query[begin : begin + count], cache, seen))
            begin += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, query: Tensor, cache: LayerCache, seen: Seen) -> Tensor:
        n, num_heads, head_dim = query.shape
        kv_heads = cache.keys.shape[2]
        slots, mask = self._decoded(cache.group, seen)
        # [n, context, kv_heads, d] -> [n, kv_heads, context, d]
        keys, values = (lines.transpose(1, 2) for lines in cache.read(slots, query.dtype))
        grouped = query.view(n, kv_heads, num_heads // kv_heads, head_dim)  # a group of heads shares its keys
        sinks = None if seen.sinks is None else seen.sinks.view(kv_heads, -1, 1)
        bias = None
        if seen.slopes is not None:  # of tokens behind the last key nothing counts
            lens = self._lens.seq_lens[:n, None]
            begin = (lens - seen.window).clamp(min=0) if seen.window else 0
            distance = torch.arange(keys.shape[2], device=query.device) + begin + 1 - lens  # [n, context]
            bias = seen.slopes.view(kv_heads, -1, 1) * distance[:, None, None]
        out = attention_of(grouped, keys, values, mask, seen, sinks=sinks, bias=bias)
        return out.reshape(n, num_heads, head_dim)

    def _decoded(self, group: int, seen: Seen) -> tuple[Tensor, Tensor]:
        """Slots [n, context] of what the decodes see, and which count: bool [n, 1, 1, context]; the others name the last token."""
        key = (group, seen.window, seen.chunk)
        if key not in self._decode_places:
            size, n = self._block_size, self._batch.num_decodes
            lens = self._lens.seq_lens[:n, None]
            context = -(-self._lens.max_decode_len // size) * size
            at = torch.arange(min(context, seen.chunk or seen.window or context), device=lens.device)
            if seen.chunk:
                at = at + (lens - 1) // seen.chunk * seen.chunk
            elif seen.window:
                at = at + (lens - seen.window).clamp(min=0)
            mask, at = at < lens, at.minimum(lens - 1)
            slots = self._batch.block_tables[group][:n].gather(1, at // size) * size + at % size
            self._decode_places[key] = slots, mask[:, None, None, :]
        return self._decode_places[key]

    def _chunk(self, index: int, query: Tensor, cache: LayerCache, seen: Seen) -> Tensor:
        context, count, size = self._lens.context_lens[index], query.shape[0], self._block_size
        first = _first_seen(context - count, seen) // size  # block
        table = self._batch.block_tables[cache.group][self._batch.num_decodes + index]
        blocks, length = table[first : -(-context // size)], context - first * size
        groups = query.shape[1] // cache.keys.shape[2]
        keys, values = (
            pages.flatten(0, 1)[:length].repeat_interleave(groups, 1)
            for pages in cache.read(blocks, query.dtype, blocks=True)
        )
        mask = self._chunk_mask(count, (first * size, context), seen, query.device)
        query, keys, values = (heads.transpose(0, 1)[None] for heads in (query, keys, values))
        sinks = None if seen.sinks is None else seen.sinks.view(-1, 1, 1)
        bias = None
        if seen.slopes is not None:
            at = torch.arange(first * size, context, device=query.device)
            bias = seen.slopes.view(-1, 1, 1) * (at - torch.arange(context - count, context, device=at.device)[:, None])
        out = attention_of(query, keys, values, mask, seen, sinks=sinks, bias=bias)
        return out[0].transpose(0, 1)

    def _chunk_mask(self, count: int, keys: tuple[int, int], seen: Seen, device: torch.device) -> Tensor | None:
        """bool [count, keys] for keys at these positions, or None for a whole prompt under plain causality."""
        begin, end = keys
        if count == end and end <= (seen.chunk or seen.window or end):
            return None
        key = (count, end, seen.window, seen.chunk)
        if key not in self._chunk_masks:
            at = torch.arange(begin, end, device=device)
            row = torch.arange(end - count, end, device=device)[:, None]
            mask = at <= row
            if seen.chunk:
                mask &= at >= row // seen.chunk * seen.chunk
            elif seen.window:
                mask &= at > row - seen.window
            self._chunk_masks[key] = mask
        return self._chunk_masks[key]


def _first_seen(position: int, seen: Seen) -> int:
    """The first key that the token at this position sees."""
    if seen.chunk:
        return position // seen.chunk * seen.chunk
    return max(0, position - seen.window + 1) if seen.window else 0
