"""The self-test of a start with --deterministic: with the sizes of the model, and what the compiler makes of the kernels on this GPU,
a row's bits are the same alone and beside others, and a query's in a decode, in a prompt and in a chunk.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.attention.requests import PagedStep
from meshlm.kernels.batch_invariant import gemm
from meshlm.kernels.batch_invariant.attention import Workspace, attention
from meshlm.kernels.self_test import same_numbers

BESIDE = (2, 17, 64, gemm.FEW_ROWS, gemm.FEW_ROWS + 1)  # rows, one of which was computed alone
CONTEXTS = (1, 65, 200, 600)
CHUNK = 37  # tokens


class Layers(NamedTuple):
    """What a model's layers compute with."""

    weights: Sequence[tuple[Tensor, bool]]
    """[outputs, inputs], one of each size, and whether the product has the gate in it."""
    heads: Sequence[tuple[int, int, int]]
    """Heads of queries, of keys, and numbers of each."""
    windows: Sequence[int]
    """0: none."""
    page: int  # tokens of a block
    longest: int  # tokens of a context at the most


def why_variant(layers: Layers) -> str:
    """Why the kernels must not be used; "" where they may be."""
    weights = layers.weights
    with same_numbers(), torch.inference_mode():
        of_products = (reason for weight, gate in weights for reason in _products(weight, gate=gate))
        like = weights[0][0]
        of_queries = (
            reason
            for heads, window in product(layers.heads, layers.windows)
            for reason in _queries(heads, window, layers, like)
        )
        return next(chain(of_products, of_queries), "")


def _products(weight: Tensor, *, gate: bool) -> Iterator[str]:
    outputs, inputs = weight.shape
    x = torch.randn(max(BESIDE), inputs, device=weight.device).to(weight.dtype)
    alone = gemm.gemm(x[:1], weight, gate=gate)
    for rows in BESIDE:
        place = rows // 2
        if not torch.equal(gemm.gemm(x[:rows].roll(place, 0), weight, gate=gate)[place : place + 1], alone):
            yield f"a row's product with a weight of {outputs} x {inputs} is another one among {rows} rows"


def _queries(heads: tuple[int, int, int], window: int, layers: Layers, like: Tensor) -> Iterator[str]:
    """like: of the model's dtype and device."""
    device = like.device
    step = PagedStep.random([(0, context) for context in CONTEXTS], heads, layers.page, like.dtype, device)
    at, last, workspace = step.at, step.at.ends.long() - 1, Workspace(device)
    lengths = torch.tensor(CONTEXTS, device=device, dtype=torch.int32)

    def run(query: Tensor, columns: Columns, *, decodes: bool) -> Tensor:
        out = torch.zeros_like(query)
        attention(
            query, step.keys, step.values, columns, heads[2] ** -0.5, out, workspace, longest=layers.longest,
            decodes=decodes, window=window,
        )  # fmt: skip
        return out

    expected = run(step.query, at, decodes=False)[last]
    ones = torch.arange(1, at.n + 1, device=device, dtype=torch.int32)
    alone = Columns(at.rows, lengths - 1, ones, at.n, at.blocks)
    if not torch.equal(run(step.query[last], alone, decodes=True), expected):
        yield f"attention with heads of {heads[2]} gives a decode other bits than a prompt"
    counts = lengths.clamp(max=CHUNK)
    query = torch.cat(
        [step.query[end - count + 1 : end + 1] for end, count in zip(last.tolist(), counts.tolist(), strict=True)]
    )
    chunks = Columns(at.rows, lengths - counts, counts.cumsum(0).int(), at.n, at.blocks)
    if not torch.equal(run(query, chunks, decodes=False)[counts.cumsum(0) - 1], expected):
        yield f"attention with heads of {heads[2]} gives a chunk other bits than a prompt"
