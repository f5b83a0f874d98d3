"""The reference of kernels/lightning_index, in plain torch and float32."""

import torch
from torch import Tensor


def index_scores(
    query: Tensor, weights: Tensor, cache: Tensor, begin: int, tables: Tensor, rows: Tensor, lengths: Tensor, width: int
) -> Tensor:
    """The scores that kernel.index_scores writes: float32 [t, width], -inf behind the tokens that a query sees."""
    dim, page = query.shape[2], cache.shape[1]
    out = torch.full((len(query), width), -torch.inf, device=query.device)
    for nth, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        blocks = tables[row, : -(-length // page)].long()
        keys = cache[blocks].flatten(0, 1)[:length, begin : begin + dim].float()
        products = (query[nth].float() @ keys.T).relu()
        out[nth, :length] = (weights[nth, :, None] * products).sum(0)
    return out


def select(scores: Tensor, tables: Tensor, rows: Tensor, lengths: Tensor, page: int, topk: int) -> list[Tensor]:
    """The tokens that kernel.select chooses: int64 slots of each query, in their order."""
    found = []
    for nth, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        best = scores[nth, :length].sort(descending=True, stable=True).indices[:topk].sort().values
        found.append(tables[row, best // page].long() * page + best % page)
    return found
