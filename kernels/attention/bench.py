"""Attention against the roofline, on the GPU that is there.

    python -P -m meshlm.kernels.attention.bench [--tune | --seen | --dims] [--json FILE]

Decode counts the bytes of keys and values read; prefill counts 4 q k d operations for each key that a query sees, and has hopper.py
beside prefill.py where the GPU and the heads fit it. --tune tries many
tile shapes and prints the best of each case. --seen times what few models' queries see: chunks of positions, slopes of heads. --dims
times prompts of heads of other sizes, and with windows.
"""

import argparse
import itertools
import json
from functools import partial
from typing import Any

import torch

from meshlm.kernels.attention.decode import Rope, decode
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras
from meshlm.kernels.attention.prefill import prefill
from meshlm.kernels.attention.tiles import decode_tiles, prefill_tiles, tile_of_head
from meshlm.kernels.measure import keep, microseconds

PAGE = 16
DECODES = [(1, 4096), (1, 32768), (8, 4096), (32, 4096), (64, 1024), (128, 4096), (256, 1024)]
LONG_DECODES = [(4, 32768), (1, 131072), (4, 131072)]
PREFILLS = [(1, 1024), (8, 1024), (1, 2048), (1, 8192), (4, 2048), (1, 32768)]
CHUNKS = [
    (24576, 1024),
    (24576, 2048),
    (24576, 8192),
]  # of one prompt: tokens of earlier steps, which are in pages, and of this one
HEADS = [(32, 8, 128), (16, 8, 128)]
CHUNK, SCOUT, BLOOM = 8192, (40, 8, 128), (32, 32, 128)  # Llama 4 Scout's chunks and heads; those of BLOOM 7B
OTHER_HEADS = [  # and their models' windows, 0: none
    ((64, 8, 64), (0, 128)),  # gpt-oss
    ((32, 32, 80), (0,)),  # Phi-2
    ((32, 32, 96), (0, 2047)),  # Phi-3-mini
    ((32, 8, 112), (0,)),
    ((32, 16, 128), (0, 1024)),  # Gemma 3 27B
    ((128, 128, 192), (0,)),  # DeepSeek-V3's prompts
    ((8, 4, 256), (0, 1024)),  # Gemma 3 4B
    ((16, 8, 256), (0, 4096)),  # Gemma 2 9B
]
OTHER_PREFILLS = [(1, 512), (4, 512), (1, 2048), (8, 1024), (1, 8192)]
SEEN_DECODES = [(1, 6144), (32, 6144), (32, 30720)]  # contexts that end in the middle of a chunk, at 3/4 of one
SEEN_PREFILLS = [(1, 8192, 0), (1, 4096, 30720), (1, 16384, 0)]  # requests, tokens, those before


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Columns, float, torch.Tensor]
"""What a kernel of prompts takes, from query to out."""


def columns(n: int, start: int, count: int) -> tuple[Columns, int]:
    """n requests of start + count tokens, pages in random order."""
    pages = -(-(start + count) // PAGE)
    total = n * pages
    blocks = torch.randperm(total, device="cuda").int().view(n, pages)
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    starts = torch.full((n,), start, dtype=torch.int32, device="cuda")
    ends = torch.arange(1, n + 1, dtype=torch.int32, device="cuda") * count
    return Columns(rows, starts, ends, n, blocks), total


def bench_decode(
    n: int, context: int, shape: tuple[int, int, int], tune: bool, extras: Extras = PLAIN
) -> dict[str, Any]:
    heads, kv_heads, dim = shape
    at, total = columns(n, context - 1, 1)
    cache = torch.randn(2, total, PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(n, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(n, heads, dim, device="cuda", dtype=torch.bfloat16)
    rope = Rope(torch.randn(context, dim, device="cuda"), None, 1e-6, heads)  # as in a model's decode
    usual = decode_tiles(n * kv_heads, context, query.device, heads // kv_heads, dim)
    own = usual[0]
    choices: list[tuple[int, int, int, int]] = [usual]
    if tune:
        splits = sorted({max(1, own // 4), max(1, own // 2), own, min(64, 2 * own)})
        choices = list(itertools.product(splits, (16, 32, 64), (1, 2, 4, 8), (2,)))
        choices += [(own, 32, 2, 3), (own, 32, 4, 3)]
    found = []
    for splits_, block_n, warps, stages in choices:
        workspace = (
            torch.empty(n * heads * splits_ * dim, device="cuda"),
            torch.empty(n * heads * splits_ * 2, device="cuda"),
            torch.zeros(n * kv_heads, dtype=torch.int32, device="cuda"),
        )

        def run(s: int = splits_, b: int = block_n, w: int = warps, g: int = stages, r: Any = workspace) -> None:
            decode(query, cache[0], cache[1], at, dim**-0.5, out, r, s, extras, rope=rope, block_n=b, warps=w, stages=g)

        try:
            found.append((microseconds(run, 10), splits_, block_n, warps, stages))
        except Exception as error:
            if not tune:
                raise
            print("skipped", splits_, block_n, warps, stages, str(error)[:60])
    found.sort()
    best = found[0][0]
    seen = (context - 1) % extras.chunk + 1 if extras.chunk else context
    bytes_read = n * seen * 2 * kv_heads * dim * 2
    result: dict[str, Any] = {"decode": [n, context], "heads": shape, **named(extras), "us": round(best, 1)}
    result["tb_s"] = round(bytes_read / best / 1e6, 2)
    if tune:
        result["best"] = [
            {"us": round(f[0], 1), "splits": f[1], "block_n": f[2], "warps": f[3], "stages": f[4]} for f in found[:4]
        ]
        result["default_us"] = round(next(f[0] for f in found if f[1:] == usual), 1)
    return result


def named(extras: Extras) -> dict[str, Any]:
    """What of the features a result names."""
    return {"chunk": extras.chunk} if extras.chunk else {"slopes": True} if extras.slopes is not None else {}


def pairs(tokens: int, start: int, chunk: int) -> float:
    """Queries x keys that each sees."""
    if not chunk:
        return (start + tokens / 2) * tokens
    return float(sum(position % chunk + 1 for position in range(start, start + tokens)))


def bench_prefill(
    n: int, tokens: int, shape: tuple[int, int, int], tune: bool, start: int = 0, extras: Extras = PLAIN
) -> dict[str, Any]:
    heads, kv_heads, dim = shape
    at, total = columns(n, start, tokens)
    cache = torch.randn(2, total, PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(n * tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    qkv = torch.randn(n * tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    choices: list[tuple[int, int, int, int] | None] = [None]  # what the table says
    if tune:
        choices += itertools.product((64, 128, 256), (64, 128), (4, 8), (2, 3, 4))
    found = []
    for tiles in choices:

        def run(t: tuple[int, int, int, int] | None = tiles) -> None:
            prefill(query, cache[0], cache[1], at, dim**-0.5, out, extras=extras, qkv=qkv, tiles=t)

        try:
            found.append((microseconds(run, 5), tiles))
        except Exception as error:
            if not tune:
                raise
            print("skipped", tiles, str(error)[:60])
    best = min(us for us, _ in found)
    result: dict[str, Any] = {"prefill": [n, tokens], "heads": shape, **named(extras), "us": round(best, 1)}
    if start:
        result["start"] = start
    operations = n * 4 * pairs(tokens, start, extras.chunk) * heads * dim
    result["tflop_s"] = round(operations / best / 1e6)
    given = (query, cache[0], cache[1], at, dim**-0.5, out)
    if not tune and (by_hopper := hopper_us(given, extras, qkv)) is not None:
        result |= {"hopper_us": round(by_hopper, 1), "hopper_tflop_s": round(operations / by_hopper / 1e6)}
    if tune:
        result["best"] = [
            {"us": round(us, 1), "tiles": tiles} for us, tiles in sorted(found, key=lambda each: each[0])[:4]
        ]
        result["default_us"] = round(found[0][0], 1)
    return result


def hopper_us(given: Given, extras: Extras, qkv: torch.Tensor) -> float | None:
    """Microseconds of hopper.py; None on other GPUs and for heads that it does not take."""
    from meshlm.kernels.attention import hopper

    if not hopper.fits(given[0], given[1]):
        return None
    return microseconds(partial(hopper.prefill, *given, extras=extras, qkv=qkv), 5)


def bench_dims() -> list[dict[str, Any]]:
    """Prompts by both kernels, and whether hopper.py gives what prefill.py gives there."""
    from meshlm.kernels.attention.self_test import self_test_hopper
    from meshlm.kernels.attention.tiles import Variant

    found = []
    for shape, windows in OTHER_HEADS:
        heads, kv_heads, dim = shape
        for window in windows:
            device = torch.device("cuda")
            reason = self_test_hopper(Variant(heads, kv_heads, dim, PAGE, torch.bfloat16, window > 0, False), device)
            for n, tokens in OTHER_PREFILLS:
                extras = Extras(window=window)
                at, total = columns(n, 0, tokens)
                cache = torch.randn(2, total, PAGE, kv_heads, dim, device=device, dtype=torch.bfloat16)
                query = torch.randn(n * tokens, heads, dim, device=device, dtype=torch.bfloat16)
                qkv = torch.randn(n * tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=torch.bfloat16)
                out = torch.empty_like(query)
                given = (query, cache[0], cache[1], at, dim**-0.5, out)
                own = tile_of_head(prefill_tiles(n * tokens * heads), dim)
                usual = microseconds(partial(prefill, *given, extras=extras, qkv=qkv, tiles=own), 5)
                result: dict[str, Any] = {
                    "prefill": [n, tokens],
                    "heads": shape,
                    "window": window,
                    "us": round(usual, 1),
                }
                if (by_hopper := hopper_us(given, extras, qkv)) is not None:
                    result |= {"hopper_us": round(by_hopper, 1), "differs": reason}
                found.append(result)
                print(json.dumps(result), flush=True)
    return found


def bench_seen() -> list[dict[str, Any]]:
    """Chunks and slopes, each beside the same without."""
    slopes = Extras(slopes=2.0 ** -torch.linspace(0.25, 8.0, BLOOM[0], device="cuda"))
    found = []
    for shape, extras in ((SCOUT, Extras(chunk=CHUNK)), (SCOUT, PLAIN), (BLOOM, slopes), (BLOOM, PLAIN)):
        for n, context in SEEN_DECODES:
            found.append(bench_decode(n, context, shape, False, extras))
        for n, tokens, start in SEEN_PREFILLS:
            found.append(bench_prefill(n, tokens, shape, False, start, extras))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seen", action="store_true", help="chunks and slopes alone")
    parser.add_argument("--dims", action="store_true", help="heads of other sizes alone, prompts by both kernels")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.dims:
        keep(bench_dims(), arguments.json)
        return
    results = bench_seen() if arguments.seen else []
    for result in results:
        print(json.dumps(result), flush=True)
    for shape in () if arguments.seen else HEADS:
        for n, context in (*DECODES, *LONG_DECODES):
            results.append(bench_decode(n, context, shape, arguments.tune))
            print(json.dumps(results[-1]), flush=True)
        for n, tokens in PREFILLS:
            results.append(bench_prefill(n, tokens, shape, arguments.tune and tokens <= 8192))
            print(json.dumps(results[-1]), flush=True)
        for start, tokens in CHUNKS:
            results.append(bench_prefill(1, tokens, shape, False, start))
            print(json.dumps(results[-1]), flush=True)
    keep(results, arguments.json)


if __name__ == "__main__":
    main()
