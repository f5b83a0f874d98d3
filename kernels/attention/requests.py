"""Requests of a step whose keys and values lie in pages, made at random: for self-tests, benches and tuners."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns

Request = tuple[int, int]
"""The tokens that earlier steps have computed, and those of this one."""


def some_columns(requests: Sequence[Request], page: int, device: torch.device) -> tuple[Columns, int]:
    """The columns of these requests, whose pages lie in any order among others', and the number of all pages."""
    needed = [-(-(start + count) // page) for start, count in requests]
    order = torch.randperm(sum(needed) + 3, device=device).int()
    blocks = order[-1].repeat(len(needed), (max(needed) // 16 + 1) * 16)  # as wide as models' tables are
    for row, pages in enumerate(order[: sum(needed)].split(needed)):
        blocks[row, : len(pages)] = pages
    starts, counts = torch.tensor(requests, dtype=torch.int32, device=device).unbind(1)
    rows = torch.arange(len(needed), dtype=torch.int32, device=device)
    return Columns(rows, starts.contiguous(), counts.cumsum(0).int(), len(needed), blocks), len(order)


class PagedStep(NamedTuple):
    """A step of attention: query [t, heads, d]; keys, values [pages, page, kv_heads, d]; its requests."""

    query: Tensor
    keys: Tensor
    values: Tensor
    at: Columns
    requests: Sequence[Request]

    @classmethod
    def random(
        cls,
        requests: Sequence[Request],
        heads: tuple[int, int, int],
        page: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PagedStep":
        """heads: of queries, of keys, and the numbers of each."""
        at, pages = some_columns(requests, page, device)
        keys, values = torch.randn(2, pages, page, *heads[1:], device=device).to(dtype)
        tokens = sum(count for _, count in requests)
        query = torch.randn(tokens, heads[0], heads[2], device=device).to(dtype)
        return cls(query, keys, values, at, requests)

    def places(self, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Pages of a request's tokens first .. last - 1, and where in them they are."""
        page, where = self.keys.shape[1], torch.arange(first, last, device=self.keys.device)
        return self.at.blocks[row, where // page].long(), where % page

    def projection(self) -> Tensor:
        """The lines of this step's tokens: nonsense for queries, then the keys and values that are in their pages."""
        places = [self.places(row, start, start + count) for row, (start, count) in enumerate(self.requests)]
        own = [torch.cat([cache[place] for place in places]) for cache in (self.keys, self.values)]
        return torch.cat((torch.full_like(self.query, 1e3), *own), 1).flatten(1)

    def spoil_others(self, first_seen: Callable[[int], int], *, own: bool = False) -> None:
        """NaN for all that is not a token of an earlier step, or is in a page before the first key that a request's tokens see.

        own: what this step's tokens have in pages stays, too."""
        read, page = torch.zeros(self.keys.shape[:2], dtype=torch.bool, device=self.keys.device), self.keys.shape[1]
        for row, (start, count) in enumerate(self.requests):
            read[self.places(row, first_seen(start) // page * page, start + count * own)] = True
        self.keys[~read] = self.values[~read] = torch.nan


def one_by_one(at: Columns, queries: int) -> Columns:
    """The tokens of requests that have `queries` each, every one as a request of its own."""
    each = torch.arange(at.n * queries, dtype=torch.int32, device=at.rows.device)
    request = (each // queries).long()
    return Columns(at.rows[request], at.starts[request] + each % queries, each + 1, len(each), at.blocks)


def decode_workspace(
    n: int, heads: int, kv_heads: int, dim: int, splits: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The workspace that decode.py needs beside its operands for so many requests."""
    parts, sums = (
        torch.empty(n * heads * splits * dim, device=device),
        torch.empty(n * heads * splits * 2, device=device),
    )
    return parts, sums, torch.zeros(n * kv_heads, dtype=torch.int32, device=device)
