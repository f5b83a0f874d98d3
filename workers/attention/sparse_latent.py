"""Latent attention to the tokens that an index has chosen for each query, in plain torch: correct everywhere.

A query reads the lines of `topk` tokens and no more, so its cost does not grow with the context beyond that of the index.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.workers.batch import LayerCache, StepInputs

QUERIES = 64  # at a time: their lines [queries, topk, width] are gathered


class Chosen(NamedTuple):
    """What chooses tokens for the queries of a step."""

    query: Tensor  # [t, heads, dim]
    key: Tensor  # [t, dim]: the cache has it behind a token's latent
    weights: Tensor  # float32 [t, heads]
    topk: int


def attend_chosen(
    absorbed: Tensor, chosen: Chosen, cache: LayerCache, batch: StepInputs, rank: int, scale: float
) -> Tensor:
    """absorbed [t, heads, rank + rotary] -> weighted sums of latents [t, heads, rank]. This step's lines are in the cache."""
    out = torch.empty(*absorbed.shape[:2], rank, dtype=absorbed.dtype, device=absorbed.device)
    width = absorbed.shape[2]
    for table, begin, end, context in _requests(batch, cache):
        blocks = table[: -(-context // cache.keys.shape[1])]
        lines = cache.read(blocks, absorbed.dtype, blocks=True)[0].flatten(0, 1)[:context, 0]
        keys = lines[:, width:].float()
        for first in range(begin, end, QUERIES):
            last = min(first + QUERIES, end)
            at = context - end + torch.arange(first, last, device=absorbed.device)  # the queries' own positions
            which, seen = _choose(chosen, keys, first, last, at)
            of = lines[which].float()  # [queries, topk, line]
            scores = torch.einsum("qhd,qkd->qhk", absorbed[first:last].float(), of[..., :width]) * scale
            weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            out[first:last] = torch.einsum("qhk,qkr->qhr", weights, of[..., :rank]).to(out.dtype)
    return out


def _choose(chosen: Chosen, keys: Tensor, first: int, last: int, at: Tensor) -> tuple[Tensor, Tensor]:
    """Places of tokens [queries, topk], and which of them count: those that stand no later than the query."""
    score = torch.zeros(last - first, len(keys), device=keys.device)
    for head in range(chosen.query.shape[1]):
        product = chosen.query[first:last, head].float() @ keys.T
        score += chosen.weights[first:last, head, None] * product.relu_()
    later = torch.arange(len(keys), device=keys.device) > at[:, None]
    which = score.masked_fill_(later, -torch.inf).topk(min(chosen.topk, len(keys)), dim=-1).indices
    return which, which <= at[:, None]


def _requests(batch: StepInputs, cache: LayerCache) -> Iterator[tuple[Tensor, int, int, int]]:
    """Block table, first token of the step, the one behind the last, and length with this step, of each request."""
    assert batch.lens is not None
    tables, lens = batch.block_tables[cache.group], batch.lens
    for row, length in enumerate(lens.seq_lens[: batch.num_decodes].tolist()):
        yield tables[row], row, row + 1, length
    begin = batch.num_decodes
    for row, (count, context) in enumerate(zip(lens.query_lens, lens.context_lens, strict=True)):
        yield tables[batch.num_decodes + row], begin, begin + count, context
        begin += count
