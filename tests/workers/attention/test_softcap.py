"""Soft-capped scores, sinks, windows and chunks in the backends of the CPU, against the formula."""

import pytest
import torch
from small_models import BLOCK, CPU, batch_of
from tiny_models import spec_of
from torch import Tensor

from meshlm.kernels.attention.seen import Seen
from meshlm.workers.attention.backend import choose
from meshlm.workers.attention.torch_backend import RotatedAttention
from meshlm.workers.batch import LayerCache

SINKS = torch.tensor([1.0, -2.0, 0.5, 3.0])


def by_formula(query: Tensor, lines: list[int], cache: LayerCache, seen: Seen) -> Tensor:
    """query [heads, d] of the last of the tokens whose keys and values lie in these lines."""
    keys, values = (found[lines].repeat_interleave(2, 1) for found in cache.flat())
    scores = torch.einsum("hd,khd->hk", query, keys) * seen.scale
    if seen.softcap:
        scores = seen.softcap * torch.tanh(scores / seen.softcap)
    first = max(0, len(lines) - seen.window) if seen.window else 0
    if seen.chunk:
        first = (len(lines) - 1) // seen.chunk * seen.chunk
    scores = scores[:, first:]
    sinks = torch.empty(len(scores), 0) if seen.sinks is None else seen.sinks[:, None]
    weights = torch.cat((scores, sinks), 1).softmax(-1)[:, : scores.shape[1]]
    return torch.einsum("hk,khd->hd", weights, values[first:])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    "seen",
    [
        Seen(3.0, softcap=2.5),
        Seen(3.0, 5, softcap=2.5),
        Seen(0.3, sinks=SINKS),
        Seen(0.3, 5, sinks=SINKS),
        Seen(3.0, 5, softcap=2.5, sinks=SINKS),
        Seen(0.3, chunk=5),
        Seen(0.3, chunk=8, sinks=SINKS),
        Seen(0.3, chunk=100),
    ],
)
def test_what_is_seen_and_how_much_it_counts(backend: str, seen: Seen) -> None:
    """Of a decode, a whole prompt and a prompt's later chunk; large scores, so that the cap is felt."""
    torch.manual_seed(0)
    parts = [([1], 9, [0, 1, 2]), ([1] * 70, 0, list(range(3, 21))), ([1] * 4, 6, [21, 22, 23])]
    batch = batch_of(parts)
    cache = LayerCache(torch.randn(24, BLOCK, 2, 32), torch.randn(24, BLOCK, 2, 32))
    query = torch.randn(75, 4, 32)
    chosen = choose(backend, spec_of(), CPU, torch.float32, BLOCK)
    attention = chosen.step(batch, BLOCK)
    assert isinstance(attention, RotatedAttention)
    found = attention.run(query, cache, seen)
    at = 0
    for tokens, start, table in parts:
        for nth in range(len(tokens)):
            lines = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start + nth + 1)]
            torch.testing.assert_close(found[at], by_formula(query[at], lines, cache, seen), atol=2e-5, rtol=1e-4)
            at += 1
    if seen.softcap or seen.sinks is not None:
        assert not torch.allclose(found, attention.run(query, cache, Seen(seen.scale, seen.window)), atol=1e-2)
