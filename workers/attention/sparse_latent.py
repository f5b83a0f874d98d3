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
    """The index that chooses tokens for the queries of a step."""

    query: Tensor  # [t, heads, dim]
    key: Tensor  # [t, dim]: the cache has it behind a token's latent
    weights: Tensor  # float32 [t, heads]
    topk: int


class LastChoice(NamedTuple):
    """In the place of `Chosen`: what the last index of the step has chosen, for a layer with the same block tables."""


ToChoose = Chosen | LastChoice | None


class Choice(NamedTuple):
    slots: Tensor  # int64 [t, most]
    seen: Tensor  # bool [t, most]: which of them count
    group: int  # whose slots they are


def choose(chosen: Chosen, cache: LayerCache, batch: StepInputs) -> Choice:
    """The best tokens of each query. The keys of this step are in the cache, at the end of its lines."""
    most = min(chosen.topk, max(context for *_, context in _requests(batch, cache)))
    num, page = len(chosen.query), cache.keys.shape[1]
    slots = torch.zeros(num, most, dtype=torch.int64, device=chosen.query.device)
    seen = torch.zeros(num, most, dtype=torch.bool, device=slots.device)
    for table, begin, end, context in _requests(batch, cache):
        lines = cache.read(table[: -(-context // page)], chosen.key.dtype, blocks=True)[0].flatten(0, 1)[:context, 0]
        keys = lines[:, -chosen.key.shape[1] :].float()
        slots[begin:end] = (table[0] * page)[None]  # a token of its own, where it sees fewer
        for first in range(begin, end, QUERIES):
            last = min(first + QUERIES, end)
            at = context - end + torch.arange(first, last, device=slots.device)  # the queries' own positions
            which, there = _best(chosen, keys, first, last, at)
            slots[first:last, : which.shape[1]] = table[which // page] * page + which % page
            seen[first:last, : which.shape[1]] = there
    return Choice(slots, seen, cache.group)


def attend_choice(absorbed: Tensor, choice: Choice, cache: LayerCache, rank: int, scale: float) -> Tensor:
    """absorbed [t, heads, rank + rotary] -> weighted sums of latents [t, heads, rank]. This step's lines are in the cache."""
    assert choice.group == cache.group
    out = torch.empty(*absorbed.shape[:2], rank, dtype=absorbed.dtype, device=absorbed.device)
    for first in range(0, len(out), QUERIES):
        some = slice(first, first + QUERIES)
        lines = cache.read(choice.slots[some], absorbed.dtype)[0][:, :, 0, : absorbed.shape[2]].float()
        scores = torch.einsum("qhd,qkd->qhk", absorbed[some].float(), lines) * scale
        weights = scores.masked_fill(~choice.seen[some, None], -torch.inf).softmax(-1)
        out[some] = torch.einsum("qhk,qkr->qhr", weights, lines[..., :rank]).to(out.dtype)
    return out


def _best(chosen: Chosen, keys: Tensor, first: int, last: int, at: Tensor) -> tuple[Tensor, Tensor]:
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
