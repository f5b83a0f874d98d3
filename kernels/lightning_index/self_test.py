"""The self-test of sparse attention at a start, with the sizes of the model: scores, the choice, attention to what is chosen, against
plain torch. Contexts are shorter and longer than what is chosen, and NaN is in all that is others'.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.attention.requests import some_columns
from meshlm.kernels.lightning_index import reference
from meshlm.kernels.lightning_index.kernel import index_scores, keep_keys, select
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.reference import absorbed_attention
from meshlm.kernels.mla.tiles import decode_tile
from meshlm.kernels.self_test import Result, distance, why_wrong

NEAR = 0.02  # of norms


class IndexShape(NamedTuple):
    """The sizes of a model's sparse attention."""

    heads: int
    rank: int
    rotary: int
    index_heads: int
    index_dim: int
    topk: int
    page: int


def self_test_index(shape: IndexShape, dtype: torch.dtype, device: torch.device) -> str:
    """Why sparse attention must not be left to the kernels; "" where it may be."""
    return why_wrong(_results(shape, dtype, device))


def _results(shape: IndexShape, dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    heads, rank, rotary, index_heads, index_dim, topk, page = shape

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    lengths = [2 * topk + 77, 1, topk, topk // 2 + 3, topk + 1]
    at, pages = some_columns([(length - 1, 1) for length in lengths], page, device)
    num, width = len(lengths), at.blocks.shape[1] * page
    cache = torch.full((pages, page, rank + rotary + index_dim), torch.nan, device=device, dtype=dtype)
    for row, length in enumerate(lengths):
        where = torch.arange(length, device=device)
        slots = at.blocks[row, where // page].long() * page + where % page
        cache.flatten(0, 1)[slots, : rank + rotary] = some(length, rank + rotary)
        keep_keys(some(length, index_dim), slots, cache, rank + rotary)
    rows, num_keys = at.rows.flip(0), torch.tensor(lengths, dtype=torch.int32, device=device).flip(0)
    query, weights = some(num, index_heads, index_dim), some(num, index_heads).float()
    scores = torch.full((num, width), -torch.inf, device=device)
    given = query, weights, cache, rank + rotary, at.blocks, rows, num_keys
    index_scores(*given, scores)
    expected = reference.index_scores(*given, width)
    there = expected > -torch.inf
    yield Result("scores of the index:", distance(scores[there], expected[there]), NEAR)
    chosen, counts = torch.empty(num, topk, dtype=torch.int32, device=device), torch.empty_like(num_keys)
    select(scores, at.blocks, rows, num_keys, page, chosen, counts)
    right = reference.select(scores, at.blocks, rows, num_keys, page, topk)
    alike = all(
        torch.equal(chosen[nth, : counts[nth]].long(), slots) and len(slots) == int(counts[nth])
        for nth, slots in enumerate(right)
    )
    yield Result("the choice of tokens:", 0.0 if alike else torch.inf, NEAR)
    absorbed, queries = some(num, heads, rank), some(num, heads, rotary)
    tokens = torch.arange(num, dtype=torch.int32, device=device)
    at_chosen = Columns(tokens, counts - 1, tokens + 1, num, chosen)
    lines, scale = cache.flatten(0, 1)[:, None], (rank + rotary) ** -0.5
    tile = decode_tile(num, heads, device)
    for splits in (1, tile.splits):
        workspace = (
            torch.empty(num * heads * splits * rank, device=device),
            torch.empty(num * heads * splits * 2, device=device),
        )
        out = torch.empty_like(absorbed)
        decode(absorbed, queries, lines, at_chosen, scale, out, workspace, tile._replace(splits=splits), rotary)
        wanted, _ = absorbed_attention(absorbed, queries, lines[..., : rank + rotary], at_chosen, scale)
        yield Result("attention to chosen tokens:", distance(out, wanted), NEAR)
