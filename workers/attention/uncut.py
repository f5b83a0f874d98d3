"""Runs of tokens that attend to one another, as the vectors of an image do (Gemma 3 and 4): beside any backend, in plain torch.

    a query sees a key that is not behind it, in its window; and each key of its own run, behind it or not

With `in_windows` (Gemma 4) layers without a window are causal, and the others' windows hold for a run's own keys, too.

The backend computes the step as if all was causal; what it gives to the tokens of runs is computed again, from the cache, in which all
keys and values of the step are by then.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshlm.kernels.attention.seen import Seen
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.attention.sparse_latent import ToChoose
from meshlm.workers.attention.torch_backend import attention_of
from meshlm.workers.batch import CrossCache, LayerCache, StepInputs, UncutRun
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.states.torch_states import StepStates


@dataclass(frozen=True, slots=True)
class UncutAttention:
    """Made once per step that has such runs; of the backend's attention of that step."""

    own: StepAttention
    batch: StepInputs
    block_size: int
    in_windows: bool = False

    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        if self.in_windows and not sliding_window:
            return self.own.attend(qkv, step, heads, scale, sliding_window)
        query = step.ops.rope_cache(qkv.clone(), step.batch, step.table, step.cache, heads)
        out = self.own.attend(qkv, step, heads, scale, sliding_window)
        seen = Seen(scale, sliding_window, heads.softcap, heads.chunk, heads.sinks, heads.slopes)
        for run in self.batch.uncut:
            part = slice(run.first, run.first + run.num_tokens)
            out[part] = self._run(run, query[part].view(run.num_tokens, heads.num_heads, -1), step.cache, seen).view_as(
                out[part]
            )
        return out

    def _run(self, run: UncutRun, query: Tensor, cache: LayerCache, seen: Seen) -> Tensor:
        """query [tokens, heads, d] of a run's tokens -> the same shape."""
        size = self.block_size
        first = min(run.begin, max(0, run.start - seen.window + 1) if seen.window else 0) // size  # block
        request = run.place if self.batch.columns is None else run.row
        blocks = self.batch.block_tables[cache.group][request, first : -(-run.end // size)].long()
        groups = query.shape[1] // cache.keys.shape[2]
        keys, values = (
            pages.flatten(0, 1)[: run.end - first * size].repeat_interleave(groups, 1)
            for pages in cache.read(blocks, query.dtype, blocks=True)
        )
        at = torch.arange(first * size, run.end, device=query.device)
        row = torch.arange(run.start, run.start + run.num_tokens, device=query.device)[:, None]
        mask, near = at <= row, at > row - seen.window if seen.window else None
        if near is not None and not self.in_windows:
            mask &= near
        mask |= at >= run.begin
        if near is not None and self.in_windows:
            mask &= near
        lost = at < row.min() - seen.window + 1 if seen.window else torch.zeros_like(mask[0])
        lost &= at < run.begin  # which no query sees: their pages may hold anything
        keys, values = (lines.masked_fill(lost[:, None, None], 0) for lines in (keys, values))
        query, keys, values = (lines.transpose(0, 1)[None] for lines in (query, keys, values))
        return attention_of(query, keys, values, mask, seen, sinks=None, bias=None)[0].transpose(0, 1)

    def attend_latent(
        self, query: Tensor, latent: Tensor, step: LayerStep, heads: LatentShape, scale: float, chosen: ToChoose = None
    ) -> Tensor:
        return self.own.attend_latent(query, latent, step, heads, scale, chosen)

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        return self.own.attend_cross(query, cache, scale)

    def states(self, group: int) -> StepStates:
        return self.own.states(group)
