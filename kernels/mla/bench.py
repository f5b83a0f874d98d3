"""Latent attention against the roofline, on the GPU that is there.

    python -P -m meshlm.kernels.mla.bench [--json FILE]

Decode counts the bytes of the cache's lines; caches of several layers take turns, so that they come from memory. Prompts are timed both
ways, with what each needs around it: absorbed (queries absorbed, values projected up) and projected up, alone and behind a context.
"""

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.measure import keep, microseconds
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.dense import context as see_context
from meshlm.kernels.mla.dense import dense
from meshlm.kernels.mla.prefill import prefill
from meshlm.kernels.mla.tiles import DecodeTile, PrefillTile, decode_tile

PAGE, RANK, ROTARY, NOPE, WIDE = 16, 512, 64, 128, 128  # of DeepSeek-V2 and V3; V2-Lite has 16 heads
LINE = RANK + ROTARY
DECODES = [(1, 1024), (1, 4096), (1, 32768), (8, 4096), (32, 1024), (32, 4096), (48, 4096), (64, 4096), (128, 4096)]
PROMPTS = [(64, 0), (128, 0), (256, 0), (512, 0), (2048, 0), (8192, 0), (128, 4096), (512, 4096), (2048, 4096)]
HEADS = [16, 128]
COLD = 200 << 20  # bytes of caches that take turns: more than the GPU keeps


def columns(n: int, start: int, count: int) -> tuple[Columns, int]:
    """n requests of start + count tokens, pages in random order."""
    pages = -(-(start + count) // PAGE)
    blocks = torch.randperm(n * pages, device="cuda").int().view(n, pages)
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    starts = torch.full((n,), start, dtype=torch.int32, device="cuda")
    ends = torch.arange(1, n + 1, dtype=torch.int32, device="cuda") * count
    return Columns(rows, starts, ends, n, blocks), n * pages


class Decodes:
    """A batch to time decodes with."""

    def __init__(self, n: int, context: int, heads: int) -> None:
        self.at, pages = columns(n, context - 1, 1)
        self.bytes = n * context * LINE * 2
        layers = min(64, -(-COLD // self.bytes))
        self.caches = [torch.randn(pages, PAGE, LINE, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        self.absorbed = torch.randn(n, heads, RANK, device="cuda", dtype=torch.bfloat16)
        self.query = torch.randn(n, heads, NOPE + ROTARY, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.absorbed)
        self._workspace = torch.empty(0, device="cuda"), torch.empty(0, device="cuda")

    def run(self, tile: DecodeTile, layers: int | None = None) -> None:
        """Runs all layers, or some."""
        n, heads = self.absorbed.shape[:2]
        workspace = n * heads * tile.splits
        if self._workspace[0].numel() < workspace * RANK:
            self._workspace = torch.empty(workspace * RANK, device="cuda"), torch.empty(workspace * 2, device="cuda")
        for cache in self.caches[:layers]:
            decode(self.absorbed, self.query, cache, self.at, 0.1, self.out, self._workspace, tile)

    def us(self, tile: DecodeTile) -> float:
        """Microseconds of one layer."""
        return microseconds(lambda: self.run(tile), 5) / len(self.caches)


class Prompt:
    """One prompt, or the chunk of one, to time both ways with."""

    def __init__(self, tokens: int, context: int, heads: int) -> None:
        self.at, pages = columns(1, context, tokens)
        self.context, self.heads = context, heads
        self.cache = torch.randn(pages, PAGE, LINE, device="cuda", dtype=torch.bfloat16)
        self.query = torch.randn(tokens, heads, NOPE + ROTARY, device="cuda", dtype=torch.bfloat16)
        self.latent = torch.randn(tokens, LINE, device="cuda", dtype=torch.bfloat16)
        self.up = torch.randn(heads * (NOPE + WIDE), RANK, device="cuda", dtype=torch.bfloat16) * 0.05
        by_head = self.up.view(heads, NOPE + WIDE, RANK)
        self.into, self.behind = by_head[:, :NOPE], by_head[:, NOPE:]
        self.out = torch.empty(tokens, heads, WIDE, device="cuda", dtype=torch.bfloat16)
        self.inner = torch.empty(tokens, heads, RANK, device="cuda", dtype=torch.bfloat16)
        self.found = torch.empty_like(self.inner)
        self.sums = torch.empty(tokens, heads, device="cuda")

    def absorbed(self, tile: PrefillTile | None = None) -> None:
        """All of it over the cache."""
        torch.bmm(self.query[..., :NOPE].transpose(0, 1), self.into, out=self.inner.transpose(0, 1))
        prefill(self.inner, self.query, self.cache, self.at, 0.1, self.found, tile=tile)
        torch.bmm(self.found.transpose(0, 1), self.behind.transpose(1, 2), out=self.out.transpose(0, 1))

    def projected(self, tile: PrefillTile | None = None) -> None:
        """This step's tokens, and those of earlier steps, projected up."""
        up = F.linear(self.latent[:, :RANK], self.up)
        prior = None
        if self.context:
            prior = torch.zeros(self.out.shape, device="cuda"), torch.full(self.sums.shape, -torch.inf, device="cuda")
            blocks = self.at.blocks[0, : self.context // PAGE]
            lines = self.cache.index_select(0, blocks).flatten(0, 1)
            see_context(self.query, lines, F.linear(lines[:, :RANK], self.up), 0.1, prior)
        dense(self.query, self.latent, up, self.at, 0.1, self.out, prior=prior, tile=tile)

    def operations(self) -> float:
        """The operations of attention with keys and values projected up, which has the fewest."""
        tokens = self.query.shape[0]
        return 2.0 * self.heads * (NOPE + ROTARY + WIDE) * tokens * (self.context + tokens / 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for heads in HEADS:
        for n, context in DECODES:
            batch = Decodes(n, context, heads)
            tile = decode_tile(n, heads, batch.query.device)
            us = batch.us(tile)
            results.append({"decode": [n, context], "heads": heads, "us": round(us, 1), "splits": tile.splits})
            results[-1]["tb_s"] = round(batch.bytes / us / 1e6, 2)
            print(json.dumps(results[-1]), flush=True)
        for tokens, context in PROMPTS:
            prompt = Prompt(tokens, context, heads)
            for way in (prompt.absorbed, prompt.projected):
                us = microseconds(way, 5)
                results.append({"prompt": [tokens, context], "heads": heads, "way": way.__name__, "us": round(us, 1)})
                results[-1]["tflop_s"] = round(prompt.operations() / us / 1e6)
                print(json.dumps(results[-1]), flush=True)
    keep(results, arguments.json)


if __name__ == "__main__":
    main()
