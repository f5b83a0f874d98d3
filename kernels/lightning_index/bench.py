"""Sparse attention against the roofline, on the GPU that is there.

    python -P -m meshlm.kernels.lightning_index.bench [--json FILE]

Decodes of DeepSeek-V3.2's sizes: scores count the bytes of the keys of all tokens, the choice those of the scores, attention those of
the chosen lines. Prompts count the operations of the same. Beside the choice stands torch's, which does not know lengths.
"""

import argparse
import json
from typing import Any

import torch

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.lightning_index.kernel import index_scores, select
from meshlm.kernels.measure import keep, microseconds
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.tiles import decode_tile

PAGE, RANK, ROTARY, DIM, INDEX_HEADS, TOPK, LONGEST = 64, 512, 64, 128, 64, 2048, 131072
LINE = RANK + ROTARY + DIM
DECODES = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (32, 4096), (32, 32768), (128, 8192)]  # requests, context
PROMPTS = [(512, 4096), (2048, 2048), (2048, 32768)]  # tokens of one request, those before
HEADS = [16, 128]


class Step:
    """Queries of a step to time kernels with: block tables, rows, lengths."""

    def __init__(self, requests: int, tokens: int, start: int) -> None:
        pages = -(-(start + tokens) // PAGE)
        order = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
        self.tables = torch.zeros(requests, LONGEST // PAGE, dtype=torch.int32, device="cuda")
        self.tables[:, :pages] = order
        self.num = requests * tokens
        positions = torch.arange(self.num, dtype=torch.int32, device="cuda")
        self.rows, self.lengths = positions // tokens, positions % tokens + start + 1
        self.cache = torch.randn(requests * pages, PAGE, LINE, device="cuda", dtype=torch.bfloat16)
        self.query = torch.randn(self.num, INDEX_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.randn(self.num, INDEX_HEADS, device="cuda")
        self.out = torch.full((min(self.num, 128), LONGEST), -torch.inf, device="cuda")
        self.chosen = torch.zeros(self.num, TOPK, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(self.num, dtype=torch.int32, device="cuda")

    def pieces(self) -> list[slice]:
        """Queries whose scores are computed together, as in a worker's step."""
        return [slice(first, min(first + 128, self.num)) for first in range(0, self.num, 128)]

    def scores(self) -> None:
        """Of all queries."""
        for some in self.pieces():
            index_scores(
                self.query[some], self.weights[some], self.cache, RANK + ROTARY, self.tables, self.rows[some],
                self.lengths[some], self.out[: some.stop - some.start],
            )  # fmt: skip

    def choice(self) -> None:
        """Of all queries, by the scores of the first ones."""
        for some in self.pieces():
            select(
                self.out[: some.stop - some.start], self.tables, self.rows[some], self.lengths[some], PAGE, self.chosen[some],
                self.counts[some],
            )  # fmt: skip

    def torchs_choice(self) -> None:
        """The same by torch.topk."""
        for some in self.pieces():
            self.out[: some.stop - some.start].topk(TOPK, sorted=False)

    def attention(self, heads: int) -> float:
        """Microseconds of attention to the chosen tokens."""
        absorbed = torch.randn(self.num, heads, RANK, device="cuda", dtype=torch.bfloat16)
        query, out = (
            torch.randn(self.num, heads, ROTARY, device="cuda", dtype=torch.bfloat16),
            torch.empty_like(absorbed),
        )
        tokens = torch.arange(self.num, dtype=torch.int32, device="cuda")
        at = Columns(tokens, self.counts - 1, tokens + 1, self.num, self.chosen)
        tile = decode_tile(self.num, heads, absorbed.device)
        parts = self.num * heads * tile.splits if tile.splits > 1 else 0
        workspace = torch.empty(parts * RANK, device="cuda"), torch.empty(parts * 2, device="cuda")
        lines = self.cache.flatten(0, 1)[:, None]
        return microseconds(lambda: decode(absorbed, query, lines, at, 0.1, out, workspace, tile, ROTARY), 5)


def bench(requests: int, tokens: int, start: int) -> list[dict[str, Any]]:
    """One step: a line for each kernel."""
    step = Step(requests, tokens, start)
    case: dict[str, Any] = {"decode": [requests, start + 1]} if tokens == 1 else {"prompt": [tokens, start]}
    seen = float(step.lengths.sum())
    found = []

    def line(kernel: str, us: float, num_bytes: float, operations: float, **more: object) -> None:
        rate = {"tb_s": round(num_bytes / us / 1e6, 2)} if tokens == 1 else {"tflop_s": round(operations / us / 1e6)}
        found.append({**case, "kernel": kernel, **more, "us": round(us, 1), **rate})

    line("scores", microseconds(step.scores, 5), seen * DIM * 2, seen * INDEX_HEADS * DIM * 2)
    line("choice", microseconds(step.choice, 5), seen * 4, 0)
    line("torch.topk", microseconds(step.torchs_choice, 3), seen * 4, 0)
    step.choice()
    chosen = float(step.counts.sum())
    for heads in HEADS:
        operations = chosen * heads * (2 * RANK + ROTARY) * 2
        line("attention", step.attention(heads), chosen * (RANK + ROTARY) * 2, operations, heads=heads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for requests, tokens, start in [(n, 1, context - 1) for n, context in DECODES] + [(1, *one) for one in PROMPTS]:
        for result in bench(requests, tokens, start):
            results.append(result)
            print(json.dumps(result), flush=True)
        torch.cuda.empty_cache()
    keep(results, arguments.json)


if __name__ == "__main__":
    main()
