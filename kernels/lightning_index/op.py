"""The records of sparse attention: scores of the index, the choice of tokens, attention to those alone. Sizes of DeepSeek-V3.2."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.attention.requests import some_columns
from meshlm.kernels.lightning_index import reference
from meshlm.kernels.lightning_index.kernel import index_scores, select
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.reference import absorbed_attention
from meshlm.kernels.mla.tiles import decode_tile
from meshlm.kernels.op import Case, Launch, Op

# page, rank, rotary, numbers and heads of the index, tokens that are chosen
Sizes = tuple[int, int, int, int, int, int]
DEEPSEEK: Sizes = (64, 512, 64, 128, 64, 2048)
TOGETHER = 128  # queries whose scores are computed together, as in a worker's step
SCALE = 0.1


class _Step:
    """Queries of a step, each with a context of its own length."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, requests: int, tokens: int, start: int, sizes: Sizes
    ) -> None:
        self.page, self.rank, self.rotary, dim, heads, self.topk = sizes
        self.at, pages = some_columns([(start, tokens)] * requests, self.page, device)
        self.num, self.dtype, self.device = requests * tokens, dtype, device
        positions = torch.arange(self.num, dtype=torch.int32, device=device)
        self.rows, self.lengths = positions // tokens, positions % tokens + start + 1
        self.cache = self.some(pages, self.page, self.rank + self.rotary + dim)
        self.query, self.weights = self.some(self.num, heads, dim), torch.randn(self.num, heads, device=device) * 0.02
        self.width = self.at.blocks.shape[1] * self.page
        self.scores = torch.full((min(self.num, TOGETHER), self.width), -torch.inf, device=device)
        self.chosen = torch.zeros(self.num, self.topk, dtype=torch.int32, device=device)
        self.counts = torch.zeros(self.num, dtype=torch.int32, device=device)
        self.seen = float(self.lengths.sum())

    def some(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def together(self, work: Callable[[slice, Tensor], object]) -> None:
        for first in range(0, self.num, TOGETHER):
            queries = slice(first, min(first + TOGETHER, self.num))
            work(queries, self.scores[: queries.stop - first])

    def score(self) -> Tensor:
        def work(queries: slice, out: Tensor) -> None:
            given = self.query[queries], self.weights[queries], self.cache, self.rank + self.rotary
            index_scores(*given, self.at.blocks, self.rows[queries], self.lengths[queries], out)

        self.together(work)
        return self.scores

    def choose(self) -> list[Tensor]:
        def work(queries: slice, scores: Tensor) -> None:
            given = scores, self.at.blocks, self.rows[queries], self.lengths[queries], self.page
            select(*given, self.chosen[queries], self.counts[queries])

        self.together(work)
        return [slots[: int(count)].float() for slots, count in zip(self.chosen, self.counts, strict=True)]


def _scores(
    dtype: torch.dtype, device: torch.device, requests: int, tokens: int, start: int, of: Sizes = DEEPSEEK
) -> Launch:
    step = _Step(dtype, device, requests, tokens, start, of)

    def expected() -> Tensor:
        given = step.query, step.weights, step.cache, step.rank + step.rotary, step.at.blocks, step.rows, step.lengths
        return reference.index_scores(*given, step.width)

    moved, done = step.seen * step.query.shape[2], step.seen * step.query[0].numel() * 2
    return Launch(step.score, expected, moved * dtype.itemsize, done)


def _choice(
    dtype: torch.dtype, device: torch.device, requests: int, tokens: int, start: int, of: Sizes = DEEPSEEK
) -> Launch:
    """Beside it torch's, which does not know lengths."""
    step = _Step(dtype, device, requests, tokens, start, of)
    step.scores.normal_()

    def expected() -> list[Tensor]:
        given = step.scores, step.at.blocks, step.rows, step.lengths, step.page
        return [slots.float() for slots in reference.select(*given, step.topk)]

    def by_torch() -> None:
        step.together(lambda queries, scores: scores.topk(min(step.topk, step.width), sorted=False))

    return Launch(step.choose, expected, step.seen * 4, beside={"torch_topk": by_torch})


def _attention(
    dtype: torch.dtype, device: torch.device, requests: int, tokens: int, start: int, heads: int, of: Sizes = DEEPSEEK
) -> Launch:
    step = _Step(dtype, device, requests, tokens, start, of)
    step.counts = step.lengths.clamp(max=step.topk)
    step.chosen.copy_(torch.randint(0, step.cache.shape[0] * step.page, step.chosen.shape, device=device))
    absorbed, query = step.some(step.num, heads, step.rank), step.some(step.num, heads, step.rotary)
    out, each = torch.empty_like(absorbed), torch.arange(step.num, dtype=torch.int32, device=device)
    at, tile = Columns(each, step.counts - 1, each + 1, step.num, step.chosen), decode_tile(step.num, heads, device)
    parts = step.num * heads * tile.splits
    workspace = torch.empty(parts * step.rank, device=device), torch.empty(parts * 2, device=device)
    lines = step.cache.flatten(0, 1)[:, None]

    def run() -> Tensor:
        decode(absorbed, query, lines, at, SCALE, out, workspace, tile, step.rotary)
        return out

    def expected() -> Tensor:
        return absorbed_attention(absorbed, query, lines[..., : step.rank + step.rotary], at, SCALE)[0]

    seen = float(step.counts.sum())
    read = seen * (step.rank + step.rotary) * dtype.itemsize
    return Launch(run, expected, read, seen * heads * (2 * step.rank + step.rotary) * 2)


SMALL: Sizes = (8, 40, 16, 48, 3, 24)
DECODES = [(1, 1, 4095), (1, 1, 32767), (1, 1, 131071), (8, 1, 4095), (32, 1, 4095), (32, 1, 32767), (128, 1, 8191)]
PROMPTS = [(1, 512, 4096), (1, 2048, 2048), (1, 2048, 32768)]  # requests, tokens, those before
STEPS: list[Case] = [*DECODES, *PROMPTS]
ODD: list[Case] = [(3, 1, 66, SMALL), (1, 9, 20, SMALL)]
OPS = (
    Op("index_scores", _scores, ODD, STEPS, near=4),
    Op("select", _choice, ODD, STEPS),
    Op(
        "attention_to_chosen", _attention, [(*case[:3], 5, SMALL) for case in ODD],
        [(*step, heads) for step, heads in product(STEPS, (16, 128))], near=2,
    ),
)  # fmt: skip
