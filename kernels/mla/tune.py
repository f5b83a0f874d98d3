"""Finds this GPU's table of latent attention's tiles and keeps it in the tree.

    python -P -m meshlm.kernels.mla.tune [--folder DIR]

Every candidate is timed on every case. A tile's cost is the geometric mean of how much slower it is than the best one of each case, so
that no single shape decides. What the GPU has no room for is left out.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshlm.kernels import pdl, tables
from meshlm.kernels.attention.tune import Times, best, timed
from meshlm.kernels.mla import bench
from meshlm.kernels.mla.tiles import MOST_HEADS, DecodeTile, PrefillTile, splits_of
from meshlm.kernels.precompile import precompiled

PER_MULTIPROCESSOR = (1.0, 2.0, 3.0)
# Lines of a tile, warps, stages, and whether lines are the rows of the products. A stage of 64 lines takes 72 KiB of the 227 that a
# multiprocessor shares: where only one program fits, nothing is read while it begins and ends.
FEW_HEADS = [
    (16, 4, 5, False),
    (16, 4, 6, False),
    (32, 4, 3, False),
    (32, 4, 4, False),
    (32, 4, 5, False),
    (32, 8, 3, False),
    (64, 4, 2, False),
    (64, 4, 3, False),
    (64, 8, 3, False),
    (64, 8, 4, False),
    (64, 4, 2, True),
    (64, 4, 3, True),
]
MANY_HEADS = [(32, 8, 3, False), (64, 8, 2, False), (64, 8, 3, False)]
LONE = 16  # splits from which on a decode is bound by how long one program takes
DECODES = {
    16: [(1, 4096), (8, 4096), (32, 1024), (32, 4096), (48, 4096), (64, 4096), (128, 4096)],
    128: [(1, 4096), (32, 4096), (128, 4096)],
}
PREFILL = [
    PrefillTile(*tile) for tile in ((32, 32, 4, 3), (64, 32, 4, 3), (64, 32, 8, 3), (64, 64, 8, 2), (64, 64, 8, 3))
]
DENSE = [
    PrefillTile(*tile)
    for tile in ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3))
]
PROMPTS = [(512, 0), (4096, 0)]


def decode_times(heads: int) -> Times:
    """Microseconds by (programs per multiprocessor, tile) of each case."""
    block_h = min(MOST_HEADS, heads)
    times: Times = {}
    multiprocessors = tables.this_gpu()["multiprocessors"]
    for n, context in DECODES[heads]:
        batch, found, known = bench.Decodes(n, context, heads), {}, {}
        for per in PER_MULTIPROCESSOR:
            splits = splits_of(n * -(-heads // block_h), int(per * multiprocessors))
            for block_n, warps, stages, of_lines in FEW_HEADS if heads <= 16 else MANY_HEADS:
                tile = DecodeTile(splits, block_n, warps, stages, block_h, of_lines)
                if tile not in known:
                    known[tile] = timed(partial(batch.run, tile), 4) / len(batch.caches)
                found[per, (block_n, warps, stages, of_lines)] = known[tile]
        times[n, context, heads] = found
        show({"decode": [n, context], "heads": heads}, found, batch.bytes / 1e6)
    return times


def compile_decodes(heads: int) -> None:
    """Compiles all candidates at once."""
    batch = bench.Decodes(2, 64, heads)
    for tile in FEW_HEADS if heads <= 16 else MANY_HEADS:
        block_n, warps, stages, of_lines = tile
        for splits in (1, 2, 4, 8, 16, 32, 64):
            batch.run(DecodeTile(splits, block_n, warps, stages, min(MOST_HEADS, heads), of_lines), 1)


def prompt_times(which: str, tiles: list[PrefillTile]) -> Times:
    """Microseconds by tile, of prompts that are computed this way."""
    times: Times = {}
    for heads in bench.HEADS:
        for tokens, context in PROMPTS:
            prompt = bench.Prompt(tokens, context, heads)
            run: Callable[[PrefillTile], None] = getattr(prompt, which)
            found = {tuple(tile): timed(partial(run, tile), 4) for tile in tiles}
            times[tokens, context, heads] = found
            show({which: [tokens, context], "heads": heads}, found, prompt.operations() / 1e6)
    return times


def show(case: dict[str, Any], found: dict[Any, float], work: float) -> None:
    """The four fastest, with what they do in a microsecond: TB/s or TFLOP/s."""
    four = sorted(found.items(), key=lambda item: item[1])[:4]
    print(json.dumps({**case, "best": [[str(key), round(us, 1), round(work / us, 2)] for key, us in four]}), flush=True)


def decode_entries(heads: int, times: Times, multiprocessors: int) -> list[dict[str, Any]]:
    """The entries for lone requests, and for the others; see tiles.decode_tile."""
    block_h = min(MOST_HEADS, heads)
    alone = [case for case in times if splits_of(case[0] * -(-heads // block_h), multiprocessors) >= LONE]
    entries = []
    for cases in (alone, [case for case in times if case not in alone]):
        (per, (block_n, warps, stages, of_lines)), _ = best(times, cases)
        where = {"splits_from": LONE} if cases is alone else {}
        entry = {"block_n": block_n, "warps": warps, "stages": stages, "of_lines": of_lines}
        entries.append({"heads_to": block_h, **where, "programs_per_multiprocessor": per, **entry})
    return entries


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="of the table; default: tables/ beside this file")
    arguments = parser.parse_args()
    assert pdl.supported()
    entries: list[dict[str, Any]] = []
    with precompiled():
        for heads in DECODES:
            compile_decodes(heads)
        for which, tiles in (("absorbed", PREFILL), ("projected", DENSE)):
            for tile in tiles:
                for heads in bench.HEADS:
                    getattr(bench.Prompt(64, 0, heads), which)(tile)
    for heads in DECODES:
        entries += decode_entries(heads, decode_times(heads), tables.this_gpu()["multiprocessors"])
    found: dict[str, Any] = {"decode": entries}
    for name, which, tiles in (("prefill", "absorbed", PREFILL), ("dense", "projected", DENSE)):
        tile, _ = best(prompts := prompt_times(which, tiles), list(prompts))
        found[name] = PrefillTile(*tile)._asdict()
    path = tables.write("mla", found, arguments.folder)
    print(path, json.dumps(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
