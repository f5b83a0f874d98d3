"""Finds where products left as parts, with the norm that adds them up, are faster than cuBLAS and the norm; keeps that in the tree.

    python -P -m meshlm.kernels.split_product.tune CONFIG.json ... [--folder DIR] [--json FILE]

CONFIG.json is a checkpoint's, of which the output and the down projection are such products. Entries of other sizes stay.
"""

import argparse
import json
from collections.abc import Callable
from itertools import product as every
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.ahead import compiled_ahead
from meshlm.kernels.measure import keep
from meshlm.kernels.norm.kernel import add_rms_norm
from meshlm.kernels.product import kernel as whole
from meshlm.kernels.product.tune import captured, replay_us, shapes, weights_of
from meshlm.kernels.split_product.kernel import Shape, split_product

ROWS = [8, 16, 32, 48, 64, 96, 128, 192, 256]
PROGRAMS = (64, 800)  # fewer leave multiprocessors idle, more come one after the other
SHARED_BYTES = 200 << 10
TURNS = 3
TURN_S = 0.01
GAIN = 0.98  # of the time of cuBLAS and the norm, at most


def candidates(rows: int, outputs: int, inputs: int) -> list[Shape]:
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    some = [Shape(block_m, *rest, 4, 3) for rest in every((32, 64, 128), (64, 128), (2, 4, 8, 16))]
    return [
        shape
        for shape in some
        if shape.fits(outputs, inputs)
        and PROGRAMS[0] <= outputs // shape.block_n * shape.splits * -(-rows // block_m) <= PROGRAMS[1]
        and (shape.block_m + shape.block_n) * shape.block_k * 2 * shape.stages <= SHARED_BYTES
    ]


def choose(times: dict[int, tuple[float, dict[Shape, float]]]) -> list[list[Any]]:
    """Entries of a table: by rows the time of cuBLAS and the norm, and of each shape. Rows between two sizes are the larger one's."""
    found, before = [], 1
    for rows, (usual, timed) in sorted(times.items()):
        best = min(timed, key=timed.__getitem__, default=None)
        if best and timed[best] <= GAIN * usual:
            found.append([before, rows, list(best)])
        before = rows
    return found


def time_all(rows: int, size: tuple[int, int]) -> tuple[float, dict[Shape, float]]:
    """Median microseconds, in turns."""
    outputs, inputs = size
    weights = weights_of(size)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    residual = torch.zeros(rows, outputs, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(outputs, device="cuda", dtype=torch.bfloat16)

    def run(shape: Shape | None) -> Callable[[Tensor], Tensor]:
        def once(w: Tensor) -> Tensor:
            made = whole.product(x, w) if shape is None else split_product(x, w, shape)
            return add_rms_norm(made, residual, norm, 1e-6)

        return once

    runs = {shape: run(shape) for shape in [None, *candidates(rows, outputs, inputs)]}
    with compiled_ahead():
        for once in runs.values():
            once(weights[0])
    graphs = {shape: captured(once, weights) for shape, once in runs.items()}
    repeats = max(2, int(TURN_S * 1e6 / replay_us(graphs[None], 2)))
    taken: dict[Shape | None, list[float]] = {shape: [] for shape in graphs}
    for _ in range(TURNS):
        for shape, graph in graphs.items():
            taken[shape].append(replay_us(graph, repeats) / len(weights))
    medians = {shape: sorted(times)[TURNS // 2] for shape, times in taken.items()}
    return medians.pop(None), {shape: time for shape, time in medians.items() if shape is not None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--folder", type=Path, help="where the table is kept; default: kernels/split_product/tables")
    parser.add_argument("--json", help="the times")
    arguments = parser.parse_args()
    known = (tables.own("split_product") or {"products": []})["products"]
    kept = {(each["outputs"], each["inputs"]): each for each in known}
    report = []
    for path in arguments.configs:
        _, out, _, down = shapes(json.loads(path.read_text()), 1)
        for size in (out, down):
            times = {rows: time_all(rows, size) for rows in arguments.rows}
            kept[size] = {"outputs": size[0], "inputs": size[1], "rows": choose(times)}
            for rows, (usual, timed) in times.items():
                best = min(timed, key=timed.__getitem__, default=None)
                line = {"rows": rows, "outputs": size[0], "inputs": size[1], "cublas_and_norm_us": round(usual, 2)}
                report.append({**line, "us": round(timed[best], 2) if best else None, "shape": best})
                print(json.dumps(report[-1]), flush=True)
            tables.write("split_product", {"products": [kept[each] for each in sorted(kept)]}, arguments.folder)
    keep(report, arguments.json)


if __name__ == "__main__":
    main()
