"""Finds this GPU's table of attention tiles and keeps it in the tree.

    python -P -m meshlm.kernels.attention.tune [--folder DIR]

Every candidate is timed on every case of bench.py. A tile's cost is the geometric mean of how much slower it is than the best one of
each case, so that no single shape decides.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from meshlm.kernels import tables
from meshlm.kernels.attention import bench
from meshlm.kernels.attention.decode import Rope, decode
from meshlm.kernels.attention.prefill import prefill
from meshlm.kernels.attention.tiles import MAX_SPLITS, SHORT_CONTEXT, splits_of
from meshlm.kernels.measure import microseconds

PER_MULTIPROCESSOR = (2.0, 4.0, 8.0)
DECODE_TILES = [(16, 1, 2), (32, 1, 2), (32, 2, 2), (64, 2, 2), (64, 4, 2)]
PREFILL_TILES = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 8, 2)]
PREFILL_ROWS = (64, 128)

Case = tuple[Any, ...]
Times = dict[Case, dict[Any, float]]  # microseconds of each candidate


def best(times: Times, cases: Iterable[Case]) -> tuple[Any, float]:
    """The candidate with the least cost over these cases, and that cost (1: the best everywhere)."""
    chosen = [times[case] for case in cases]
    candidates = set.intersection(*(set(found) for found in chosen))

    def cost(candidate: Any) -> float:
        return exp(sum(log(found[candidate] / min(found.values())) for found in chosen) / len(chosen))

    winner = min(sorted(candidates), key=cost)
    return winner, cost(winner)


def lone(case: Case) -> bool:
    """The case of one request with a short context and as many splits as there are."""
    n, context, (_, kv_heads, _), multiprocessors = case
    splits = splits_of(n * kv_heads, min(PER_MULTIPROCESSOR), multiprocessors)
    return bool(splits == MAX_SPLITS and context <= SHORT_CONTEXT)


def decode_table(times: Times) -> dict[str, Any]:
    """Makes the table of decodes from microseconds by (programs per multiprocessor, tile)."""
    found: list[tuple[float, float, list[dict[str, Any]]]] = []
    for per in sorted({key[0] for of_case in times.values() for key in of_case}):
        entries, costs = [], []
        for bucket in (True, False):
            cases = [case for case in times if lone(case) == bucket]
            if not cases:
                continue
            # The cost is against the best over all numbers of programs.
            own = {case: {key: us for key, us in times[case].items() if key[0] == per} for case in cases}
            (_, (block_n, warps, stages)), _ = best(own, cases)
            tile = (per, (block_n, warps, stages))
            costs += [log(times[case][tile] / min(times[case].values())) for case in cases]
            where = {"splits_from": MAX_SPLITS, "longest_to": SHORT_CONTEXT} if bucket else {}
            entries.append({**where, "block_n": block_n, "warps": warps, "stages": stages})
        found.append((sum(costs) / len(costs), per, entries))
    _, per, entries = min(found, key=lambda item: item[:2])
    return {"programs_per_multiprocessor": per, "decode": entries}


def prefill_table(times: Times) -> list[dict[str, Any]]:
    """From microseconds by (rows, tile); a case is (tokens x query heads, ...). Few rows up to the last case where they win."""
    works = sorted({case[0] for case in times})
    small = [work for work in works if best(times, [c for c in times if c[0] == work])[0][0] == PREFILL_ROWS[0]]
    edge = max(small, default=0)
    entries = []
    for rows, cases in zip(PREFILL_ROWS, ([c for c in times if c[0] <= edge], [c for c in times if c[0] > edge])):
        if not cases:
            continue
        own = {case: {key: us for key, us in times[case].items() if key[0] == rows} for case in cases}
        (_, (block_n, warps, stages)), _ = best(own, cases)
        where = {"work_to": edge} if rows == PREFILL_ROWS[0] and edge < works[-1] else {}
        entries.append({**where, "rows": rows, "block_n": block_n, "warps": warps, "stages": stages})
    return entries


def hopper_table(times: Times, on_hopper: dict[Case, float]) -> dict[str, dict[str, int]]:
    """By numbers of a head, from how many pairs x query heads on hopper.py is faster than the best of prefill.py's tiles."""

    def pairs(case: Case) -> int:
        work, _, tokens, _ = case
        return int(work * tokens // 2)

    found = {}
    for dim in {case[3][2] for case in on_hopper}:
        cases = {case: us for case, us in on_hopper.items() if case[3][2] == dim}
        lost = max((pairs(case) for case, us in cases.items() if us >= min(times[case].values())), default=0)
        won = [pairs(case) for case in cases if pairs(case) > lost]
        found.update({str(dim): min(won)} if won else {})
    return {"hopper_from": found}


def time_decode(n: int, context: int, shape: tuple[int, int, int], multiprocessors: int) -> dict[Any, float]:
    heads, kv_heads, dim = shape
    at, total = bench.columns(n, context - 1, 1)
    cache = torch.randn(2, total, bench.PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(n, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(n, heads, dim, device="cuda", dtype=torch.bfloat16)
    rope = Rope(torch.randn(context, dim, device="cuda"), None, 1e-6, heads)
    workspace = (
        torch.empty(n * heads * MAX_SPLITS * dim, device="cuda"),
        torch.empty(n * heads * MAX_SPLITS * 2, device="cuda"),
        torch.zeros(n * kv_heads, dtype=torch.int32, device="cuda"),
    )
    by_launch: dict[Any, float] = {}
    found: dict[Any, float] = {}
    for per in PER_MULTIPROCESSOR:
        splits = splits_of(n * kv_heads, per, multiprocessors)
        for tile in DECODE_TILES:
            block_n, warps, stages = tile

            def run(s: int = splits, b: int = block_n, w: int = warps, g: int = stages) -> None:
                decode(
                    query, cache[0], cache[1], at, dim**-0.5, out, workspace, s, rope=rope, block_n=b, warps=w, stages=g
                )

            if (splits, tile) not in by_launch:
                by_launch[splits, tile] = timed(run, 10)
            found[per, tile] = by_launch[splits, tile]
    return found


def time_prefill(n: int, tokens: int, shape: tuple[int, int, int]) -> tuple[dict[Any, float], float | None]:
    """Microseconds of prefill.py by (rows, tile), and of hopper.py where it runs."""
    heads, kv_heads, dim = shape
    at, total = bench.columns(n, 0, tokens)
    cache = torch.randn(2, total, bench.PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(n * tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    qkv = torch.randn(n * tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    found: dict[Any, float] = {}
    for rows in PREFILL_ROWS:
        for block_n, warps, stages in PREFILL_TILES:

            def run(r: int = rows, b: int = block_n, w: int = warps, g: int = stages) -> None:
                prefill(query, cache[0], cache[1], at, dim**-0.5, out, qkv=qkv, tiles=(r, b, w, g))

            found[rows, (block_n, warps, stages)] = timed(run, 5)
    try:
        from meshlm.kernels.attention import hopper
    except ImportError:  # a Triton without its dialect
        return found, None
    if not hopper.fits(query, cache[0]):
        return found, None
    return found, timed(lambda: hopper.prefill(query, cache[0], cache[1], at, dim**-0.5, out, qkv=qkv), 5)


def timed(run: Callable[[], None], repeats: int) -> float:
    """Infinity where the GPU has no room for the tile."""
    try:
        return microseconds(run, repeats)
    except Exception as error:
        print("left out:", str(error).splitlines()[0][:80])
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="of the table; default: tables/ beside this file")
    arguments = parser.parse_args()
    multiprocessors = tables.this_gpu()["multiprocessors"]
    decodes: Times = {}
    prefills: Times = {}
    on_hopper: dict[Case, float] = {}
    for shape in bench.HEADS:
        for n, context in bench.DECODES:
            decodes[n, context, shape, multiprocessors] = time_decode(n, context, shape, multiprocessors)
        for n, tokens in bench.PREFILLS:
            if tokens <= SHORT_CONTEXT:
                case = n * tokens * shape[0], n, tokens, shape
                prefills[case], hopper_us = time_prefill(n, tokens, shape)
                if hopper_us is not None:
                    on_hopper[case] = hopper_us
        print(f"heads {shape}: timed", flush=True)
    found = {**decode_table(decodes), "prefill": prefill_table(prefills), **hopper_table(prefills, on_hopper)}
    before = (tables.own("attention") or {"decode": []})["decode"]  # whole steps found those of groups (--tune full)
    found["decode"] = [entry for entry in before if "group_to" in entry] + found["decode"]
    known = tables.read("attention")  # perhaps another GPU's, and its other heads count here too (bench.py --dims)
    if tables.is_kin(known):
        found["hopper_from"] = {**known.get("hopper_from", {}), **found["hopper_from"]}
        found["hopper_windows"] = known.get("hopper_windows", {})
    path = tables.write("attention", found, arguments.folder)
    print(path, json.dumps(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
