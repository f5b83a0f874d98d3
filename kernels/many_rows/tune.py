"""Finds where kernels/many_rows is faster than cuBLAS and the kernel behind it; keeps that in the tree.

    python -P -m meshlm.kernels.many_rows.tune --models DIR ... [--tp 1 2] [--jobs N] [--folder DIR] [--json FILE]

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
from meshlm.kernels.ahead import compiled_ahead
from meshlm.kernels.many_rows.cases import Case, cases
from meshlm.kernels.many_rows.kernel import Shape
from meshlm.kernels.measure import keep, replay_us
from meshlm.kernels.product.tune import captured

ROWS = [512, 768, 1024, 1536, 2048, 3072, 4096, 8192]
TURN_S = 0.06  # power is the limit
TURNS = 3
FAR = 1.04  # times the fastest
GAIN = 0.99  # of the time of the unfused operations, at most
DOWN_TO = 0.85  # a choice is for rows from so much of those it was tuned for, where fewer are better unfused
OFF = 0.02  # of the result's norm: more than rounding
Timed = dict[Shape | None, float]  # microseconds; None is the unfused operations


def time_all(case: Case, rows: int, shapes: list[Shape]) -> Timed:
    """Median microseconds of each, in turns."""
    x = torch.randn(rows, case.inputs, device="cuda", dtype=torch.bfloat16)
    runs: dict[Shape | None, Callable[[Tensor], object]] = {None: lambda w: case.usual(x, w)}
    for each in shapes:
        runs[each] = lambda w, shape=each: case.fused(x, w, shape)  # type: ignore[misc]
    graphs = {shape: captured(run, case.weights) for shape, run in runs.items()}
    repeats = max(2, int(TURN_S * 1e6 / replay_us(graphs[None], 2)))
    taken: dict[Shape | None, list[float]] = {shape: [] for shape in graphs}
    for turn in range(TURNS):
        first = {shape: times[0] for shape, times in taken.items() if times}
        for shape, graph in graphs.items():
            if turn and shape is not None and first[shape] > FAR * min(first.values()):
                continue
            taken[shape].append(replay_us(graph, repeats) / len(case.weights))
    return {shape: sorted(times)[len(times) // 2] for shape, times in taken.items()}


def right(case: Case, rows: int) -> list[Shape]:
    """The candidates that can be launched, and compute what the unfused operations do."""
    x, w = torch.randn(rows, case.inputs, device="cuda", dtype=torch.bfloat16), case.weights[0]
    expected, found = case.usual(x, w).float(), []
    for shape in case.candidates():
        try:
            off = float((case.fused(x, w, shape).float() - expected).norm() / expected.norm())
        except Exception as error:  # Triton's errors have no common class
            print("cannot run:", case.key, shape, f"{type(error).__name__}: {error}"[:100], flush=True)
            continue
        if off <= OFF:
            found.append(shape)
        else:
            print("wrong:", case.key, shape, f"off by {off:.3f}", flush=True)
    return found


def entries(times: dict[int, Timed]) -> list[list[Any]]:
    """Of a table: rows above, up to, and the shape. Rows between two sizes are the larger one's, if both are better fused."""
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


def of_case(case: Case, sizes: list[int], jobs: int) -> dict[int, Timed]:
    with compiled_ahead(threads=jobs):
        x = torch.randn(256, case.inputs, device="cuda", dtype=torch.bfloat16)
        for shape in case.candidates():
            case.fused(x, case.weights[0], shape)
    shapes = right(case, 300)
    return {rows: time_all(case, rows, shapes) for rows in sizes}


def lines(case: Case, times: dict[int, Timed]) -> list[dict[str, Any]]:
    """Of the report, one for each number of rows."""
    found = []
    for rows, timed in times.items():
        best = min((shape for shape in timed if shape is not None), key=timed.__getitem__, default=None)
        line = {**dict(zip(("outputs", "inputs", "use"), case.key, strict=True)), "rows": rows}
        line |= {"usual_us": round(timed[None], 2), "fused_us": best and round(timed[best], 2), "shape": best}
        found.append(line | {"all": [[shape, round(us, 2)] for shape, us in timed.items() if shape is not None]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", type=Path, required=True, help="folders with a config.json")
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--jobs", type=int, help="threads that compile; default: as a start has")
    parser.add_argument("--folder", type=Path, help="where the table is kept; default: kernels/many_rows/tables")
    parser.add_argument("--json", help="all times")
    arguments = parser.parse_args()
    known = (tables.own("many_rows") or {"products": []})["products"]
    kept = {(each["outputs"], each["inputs"], each["use"]): each for each in known}
    report = []
    for path in arguments.models:
        config = json.loads((path / "config.json").read_text())
        for case in (case for ranks in arguments.tp for case in cases(config, ranks)):
            case.make(max(arguments.rows))
            times = of_case(case, arguments.rows, arguments.jobs)
            key = dict(zip(("outputs", "inputs", "use"), case.key, strict=True))
            kept[case.key] = {**key, "rows": entries(times)}
            for line in lines(case, times):
                report.append({"model": path.name, **line})
                print(json.dumps({name: value for name, value in report[-1].items() if name != "all"}), flush=True)
            case.free()
            tables.write("many_rows", {"products": [kept[each] for each in sorted(kept)]}, arguments.folder)
    keep(report, arguments.json)


if __name__ == "__main__":
    main()
