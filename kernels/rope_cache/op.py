"""The record of rotation and cache writes, with and without norms of heads. Heads of Qwen3-0.6B and Llama-3.1-8B."""

from itertools import product

import torch
from torch import Tensor

from meshlm.kernels.op import Launch, Op
from meshlm.kernels.rope_cache import kernel, reference

PAGE, EPS, LENGTH = 16, 1e-6, 40


def _make(
    dtype: torch.dtype, device: torch.device, tokens: int, heads: tuple[int, int, int], rotary: int, normed: bool
) -> Launch:
    """heads: of queries, of keys, numbers of each. The last token has no slot."""
    num, kv_heads, dim = heads
    qkv = torch.randn(tokens, (num + 2 * kv_heads) * dim, device=device).to(dtype)
    angles = torch.outer(torch.arange(LENGTH), 1.0 / 10000 ** (torch.arange(0, rotary, 2) / rotary)).to(device)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(LENGTH, (tokens,), device=device)
    pages = -(-tokens // PAGE) + 1
    slots = torch.randperm(pages * PAGE, device=device)[:tokens]
    slots[-1] = -1
    norms = tuple(torch.rand(2, dim, device=device).to(dtype) + 0.5) if normed else None
    caches = torch.zeros(2, pages, PAGE, kv_heads, dim, device=device, dtype=dtype)

    def run() -> list[Tensor]:
        query = kernel.rope_cache(qkv, positions, slots, table, norms, EPS, caches[0], caches[1], num)
        return [query, qkv, *caches]

    def expected() -> list[Tensor]:
        lines, theirs = qkv.clone(), caches.clone()
        query = reference.rope_cache(lines, positions, slots, table, norms, EPS, theirs[0], theirs[1], num)
        return [query, lines, *theirs]

    return Launch(run, expected, 2 * qkv.nbytes)


ODD = [((4, 2, 64), 64), ((3, 1, 80), 80), ((9, 3, 64), 32), ((8, 8, 128), 128)]
MODELS = [((16, 8, 128), 128, True), ((32, 8, 128), 128, False)]
OPS = (
    Op(
        "rope_cache", _make, [(5, *heads, normed) for heads, normed in product(ODD, (False, True))],
        [(tokens, *model) for model, tokens in product(MODELS, (16, 64, 256, 2048, 8192))],
    ),
)  # fmt: skip
