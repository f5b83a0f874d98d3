"""Finds where kernels/gate_up_silu is faster than cuBLAS and silu_mul; keeps that in the tree.

    python -P -m meshlm.kernels.gate_up_silu.tune --models DIR ... [--tp 1 2] [--jobs N] [--folder DIR] [--json FILE]

DIR has a checkpoint's config.json. For each size all tiles take turns with the unfused operations, each for as long as the power limit
needs to show, with weights that come from memory; those far behind leave after the first turn. A tile whose result is not that of the
unfused operations is named and left out. Entries of other sizes stay.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.gate_up_silu.kernel import Shape, gate_up_silu
from meshlm.kernels.gemm.kernel import gemm
from meshlm.kernels.gemm.tune import captured, shapes, weights_of
from meshlm.kernels.measure import keep, replay_us
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.silu_mul.kernel import silu_mul

# What Triton 3.6 compiles for compute capability 9.0 without spilling registers.
CANDIDATES = [
    *(Shape(128, 128, 64, 8, stages, flat) for stages in (3, 4) for flat in (False, True)),
    *(Shape(128, 128, 128, 8, 2, flat) for flat in (False, True)),
    *(Shape(256, 64, 64, 8, 4, flat) for flat in (False, True)),
    *(Shape(128, 64, 64, 8, 3, flat, 2) for flat in (False, True)),
    Shape(128, 64, 64, 4, 3, True, 2),
    Shape(64, 128, 64, 4, 2, True, 2),
]
ROWS = [512, 768, 1024, 1536, 2048, 3072, 4096, 8192]
CHECKED = 3000  # rows whose result is compared
TURN_S = 0.06  # power is the limit
TURNS = 3
FAR = 1.04  # times the fastest
GAIN = 0.99  # of the time of the unfused operations, at most
DOWN_TO = 0.85  # a choice is for rows from so much of those it was tuned for, where fewer are better unfused
OFF = 0.02  # of the result's norm: more than rounding
Timed = dict[Shape | None, float]  # microseconds; None is the unfused operations
Weights = list[Tensor]  # [2n, k], more of them than the L2 cache holds


def usual(x: Tensor, w: Tensor) -> Tensor:
    return silu_mul(gemm(x, w))


def time_all(weights: Weights, rows: int, candidates: list[Shape]) -> Timed:
    """Median microseconds of each, in turns."""
    x = torch.randn(rows, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
    runs: dict[Shape | None, Callable[[Tensor], object]] = {None: lambda w: usual(x, w)}
    for each in candidates:
        runs[each] = lambda w, shape=each: gate_up_silu(x, w, shape)  # type: ignore[misc]
    graphs = {shape: captured(run, weights) for shape, run in runs.items()}
    repeats = max(2, int(TURN_S * 1e6 / replay_us(graphs[None], 2)))
    taken: dict[Shape | None, list[float]] = {shape: [] for shape in graphs}
    for turn in range(TURNS):
        first = {shape: times[0] for shape, times in taken.items() if times}
        for shape, graph in graphs.items():
            if turn and shape is not None and first[shape] > FAR * min(first.values()):
                continue
            taken[shape].append(replay_us(graph, repeats) / len(weights))
    return {shape: sorted(times)[len(times) // 2] for shape, times in taken.items()}


def right(x: Tensor, w: Tensor, candidates: list[Shape]) -> list[Shape]:
    """The shapes that can be launched, and compute what the unfused operations do."""
    expected, found = usual(x, w).float(), []
    for shape in candidates:
        try:
            off = float((gate_up_silu(x, w, shape).float() - expected).norm() / expected.norm())
        except Exception as error:  # Triton's errors have no common class
            print("cannot run:", shape, f"{type(error).__name__}: {error}"[:100], flush=True)
            continue
        if off <= OFF:
            found.append(shape)
        else:
            print("wrong:", shape, f"off by {off:.3f}", flush=True)
    return found


def entries(times: dict[int, Timed]) -> list[list[Any]]:
    """A table's entries: rows above, up to, and the shape. Rows between two sizes are the larger one's, if both are better fused."""
    found: list[list[Any]] = []
    before, won = 0, False
    for rows, timed in sorted(times.items()):
        best = min(timed, key=timed.__getitem__)
        if best is None or timed[best] > GAIN * timed[None]:
            before, won = rows, False
            continue
        if won and found[-1][2] == list(best):
            found[-1][1] = rows
        else:
            found.append([before if won else max(before, int(DOWN_TO * rows)), rows, list(best)])
        before, won = rows, True
    return found


def of_weights(weights: Weights, sizes: list[int], jobs: int | None) -> dict[int, Timed]:
    x = torch.randn(CHECKED, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
    with precompiled(threads=jobs):
        for shape in CANDIDATES:
            gate_up_silu(x, weights[0], shape)
    candidates = right(x, weights[0], CANDIDATES)
    return {rows: time_all(weights, rows, candidates) for rows in sizes}


def lines(times: dict[int, Timed]) -> list[dict[str, Any]]:
    """The lines of the report, one for each number of rows."""
    found = []
    for rows, timed in times.items():
        fused = {shape: round(us, 2) for shape, us in timed.items() if shape is not None}
        best = min(fused, key=fused.__getitem__, default=None)
        line = {"rows": rows, "usual_us": round(timed[None], 2), "fused_us": best and fused[best], "shape": best}
        found.append({**line, "all": [[shape, us] for shape, us in fused.items()]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", type=Path, required=True, help="folders with a config.json")
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--jobs", type=int, help="threads that compile; default: as a start has")
    parser.add_argument("--folder", type=Path, help="where the table is kept; default: kernels/gate_up_silu/tables")
    parser.add_argument("--json", help="all times")
    arguments = parser.parse_args()
    known = (tables.own("gate_up_silu") or {"products": []})["products"]
    kept = {(each["outputs"], each["inputs"]): each for each in known}
    report = []
    for path in arguments.models:
        config = json.loads((path / "config.json").read_text())
        for ranks in arguments.tp:
            gate_up = shapes(config, ranks)[2]
            times = of_weights(weights_of(gate_up), arguments.rows, arguments.jobs)
            key = dict(zip(("outputs", "inputs"), gate_up, strict=True))
            kept[gate_up] = {**key, "rows": entries(times)}
            for line in lines(times):
                report.append({"model": path.name, **key, **line})
                print(json.dumps({name: value for name, value in report[-1].items() if name != "all"}), flush=True)
            tables.write("gate_up_silu", {"products": [kept[each] for each in sorted(kept)]}, arguments.folder)
    keep(report, arguments.json)


if __name__ == "__main__":
    main()
