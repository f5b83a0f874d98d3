"""Soft-capped scores in the backends of the CPU, against the formula."""

import pytest
import torch
from small_models import BLOCK, CPU, batch_of
from tiny_models import spec_of
from torch import Tensor

from meshlm.workers.attention.backend import choose
from meshlm.workers.attention.rotated import RotatedAttention
from meshlm.workers.batch import LayerCache


def by_formula(query: Tensor, lines: list[int], cache: LayerCache, scale: float, window: int, cap: float) -> Tensor:
    """query [heads, d] of the last of the tokens whose keys and values lie in these lines."""
    keys, values = (found[lines].repeat_interleave(2, 1) for found in cache.flat())
    scores = torch.einsum("hd,khd->hk", query, keys) * scale
    weights = (cap * torch.tanh(scores / cap))[:, -window if window else 0 :].softmax(-1)
    return torch.einsum("hk,khd->hd", weights, values[-window if window else 0 :])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("window", [0, 5])
def test_scores_are_capped(backend: str, window: int) -> None:
    """Of a decode, a whole prompt and a prompt's later chunk; large scores, so that the cap is felt."""
    torch.manual_seed(0)
    parts = [([1], 9, [0, 1, 2]), ([1] * 70, 0, list(range(3, 21))), ([1] * 4, 6, [21, 22, 23])]
    batch = batch_of(parts)
    cache = LayerCache(torch.randn(24, BLOCK, 2, 32), torch.randn(24, BLOCK, 2, 32))
    query, scale, cap = torch.randn(75, 4, 32), 3.0, 2.5
    chosen = choose(backend, spec_of(), CPU, torch.float32, BLOCK)
    attention = chosen.step(batch, BLOCK)
    assert isinstance(attention, RotatedAttention)
    found = attention.run(query, cache, scale, window, cap)
    at = 0
    for tokens, start, table in parts:
        for nth in range(len(tokens)):
            lines = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start + nth + 1)]
            torch.testing.assert_close(
                found[at], by_formula(query[at], lines, cache, scale, window, cap), atol=2e-5, rtol=1e-4
            )
            at += 1
    assert not torch.allclose(found, attention.run(query, cache, scale, window), atol=1e-2)
