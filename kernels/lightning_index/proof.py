"""Whether the kernels of sparse attention do what plain torch does on this very GPU: scores, the choice, attention to what is chosen.

Asked by a worker's start, with the sizes of its model; contexts are shorter and longer than what is chosen, and NaN is in all that is
others'.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.lightning_index import reference
from meshlm.kernels.lightning_index.kernel import index_scores, keep_keys, select
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.reference import absorbed_attention
from meshlm.kernels.mla.tiles import decode_tile

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


def prove_index(shape: IndexShape, dtype: torch.dtype, device: torch.device) -> str:
    """Why sparse attention must not be left to the kernels; "" when it may be."""
    try:
        for what, error in _errors(shape, dtype, device):
            if not error <= NEAR:  # NaN is wrong too
                return f"{what}: {error:.3g} of the norm away from plain torch"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler or a driver; no kernel is worth the process
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises if the GPU itself has failed
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return ""


def _errors(shape: IndexShape, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, float]]:
    heads, rank, rotary, index_heads, index_dim, topk, page = shape
    random = torch.Generator(device).manual_seed(4)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random, device=device).to(dtype)

    lengths = torch.tensor([2 * topk + 77, 1, topk, topk // 2 + 3, topk + 1], dtype=torch.int32, device=device)
    num, width = len(lengths), -(-int(lengths.max()) // page) * page
    blocks = width // page
    tables = torch.randperm(num * blocks, generator=random, device=device).int().view(num, blocks)
    rows = torch.arange(num, dtype=torch.int32, device=device).flip(0)
    cache = torch.full((num * blocks, page, rank + rotary + index_dim), torch.nan, device=device, dtype=dtype)
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        at = torch.arange(length, device=device)
        slots = tables[row, at // page].long() * page + at % page
        cache.flatten(0, 1)[slots, : rank + rotary] = some(length, rank + rotary)
        keep_keys(some(length, index_dim), slots, cache, rank + rotary)
    query, weights = some(num, index_heads, index_dim), some(num, index_heads).float()
    scores = torch.full((num, width), -torch.inf, device=device)
    asked = query, weights, cache, rank + rotary, tables, rows, lengths
    index_scores(*asked, scores)
    expected = reference.index_scores(*asked, width)
    there = expected > -torch.inf
    yield "scores of the index", _error(scores[there], expected[there])
    chosen, counts = torch.empty(num, topk, dtype=torch.int32, device=device), torch.empty_like(lengths)
    select(scores, tables, rows, lengths, page, chosen, counts)
    right = reference.select(scores, tables, rows, lengths, page, topk)
    alike = all(
        torch.equal(chosen[nth, : counts[nth]].long(), slots) and len(slots) == int(counts[nth])
        for nth, slots in enumerate(right)
    )
    yield "the choice of tokens", 0.0 if alike else float("inf")
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
        yield "attention to chosen tokens", _error(out, wanted)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
