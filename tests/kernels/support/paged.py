"""Requests whose keys and values lie in pages in random order. The tests of attention share it."""

import torch
from device import DEVICE

from meshlm.kernels.attention.kernel import ITEM, Columns, SharedPrefixes

PAGE = 16


def make(
    requests: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page: int = PAGE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Columns]:
    """requests: (start, count). Every page table is a random permutation."""
    torch.manual_seed(1)
    pages = [-(-(start + count) // page) for start, count in requests]
    total = sum(pages) + 3
    order = torch.randperm(total)
    blocks = torch.zeros(len(requests) + 2, max(pages) + 1, dtype=torch.int32)
    rows = torch.randperm(len(requests) + 2)[: len(requests)].int()
    at = 0
    for row, need in zip(rows.tolist(), pages, strict=True):
        blocks[row, :need] = order[at : at + need].int()
        at += need
    starts = torch.tensor([start for start, _ in requests], dtype=torch.int32)
    ends = torch.tensor([count for _, count in requests], dtype=torch.int32).cumsum(0).int()
    columns = Columns(rows.to(DEVICE), starts.to(DEVICE), ends.to(DEVICE), len(requests), blocks.to(DEVICE))
    cache = torch.randn(2, total, page, kv_heads, dim, device=DEVICE).to(dtype)
    query = torch.randn(int(ends[-1]), heads, dim, device=DEVICE).to(dtype)
    return query, cache[0], cache[1], columns


def step_of(keys: torch.Tensor, values: torch.Tensor, at: Columns, heads: int) -> torch.Tensor:
    """The projection whose keys and values are in these pages; where queries should be is nonsense."""
    lines, page = [], keys.shape[1]
    begin = 0
    for row, start, end in zip(at.rows.tolist(), at.starts.tolist(), at.ends.tolist(), strict=True):
        where = torch.arange(start, start + end - begin, device=keys.device)
        slots = at.blocks[row, where // page].long() * page + where % page
        noise = torch.full((len(slots), heads, keys.shape[-1]), 1e3, device=keys.device, dtype=keys.dtype)
        lines.append(torch.cat((noise, keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]), dim=1))
        begin = end
    return torch.cat(lines).flatten(1)


def give_away(keys: torch.Tensor, values: torch.Tensor, at: Columns, window: int) -> None:
    """What the pages before each request's window held is overwritten by their new owners."""
    _overwrite(keys, values, at, [max(0, start - window + 1) for start in at.starts[: at.n].tolist()])


def give_away_chunks(keys: torch.Tensor, values: torch.Tensor, at: Columns, chunk: int) -> None:
    """The same before the chunk that each request's first token is in."""
    _overwrite(keys, values, at, [start // chunk * chunk for start in at.starts[: at.n].tolist()])


def _overwrite(keys: torch.Tensor, values: torch.Tensor, at: Columns, firsts: list[int]) -> None:
    for row, first in zip(at.rows[: at.n].tolist(), firsts, strict=True):
        pages = at.blocks[row, : first // keys.shape[1]].long()
        keys[pages] = values[pages] = torch.nan


def share(
    keys: torch.Tensor, values: torch.Tensor, at: Columns, clusters: list[tuple[list[int], int]], tile: int, piece: int
) -> SharedPrefixes:
    """Let the requests of each cluster begin with its first one's pages, for so many tokens; what they had there is NaN.

    tile: requests of one. piece: tokens, a multiple of PREFIX_STEP. There is room for two items more.
    """
    members, items = torch.zeros(at.n, dtype=torch.int32), []
    tokens, parts = torch.zeros(2, at.n, dtype=torch.int32)
    low = 0
    for requests, length in clusters:
        pages = length // keys.shape[1]
        leader = at.blocks[at.rows[requests[0]], :pages].long()
        for member in requests[1:]:
            own = at.blocks[at.rows[member], :pages].long()
            keys[own] = values[own] = torch.nan
            at.blocks[at.rows[member], :pages] = leader.int()
        tokens[requests], parts[requests] = length, -(-length // piece)
        members[low : low + len(requests)] = torch.tensor(requests)
        for begin in range(0, len(requests), tile):
            count = min(tile, len(requests) - begin)
            for first in range(0, length, piece):
                items.append([low + begin, count, first, min(length, first + piece), first // piece])
        low += len(requests)
    items += [[0] * ITEM] * 2
    lines = torch.tensor(items, dtype=torch.int32)
    at_most = max(1, int(parts.max()))
    return SharedPrefixes(lines.to(DEVICE), members.to(DEVICE), tokens.to(DEVICE), parts.to(DEVICE), tile, at_most)
