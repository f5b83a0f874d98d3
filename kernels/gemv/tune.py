"""Finds this GPU's table of gemv tiles, and up to which weight the kernel beats cuBLAS; keeps it in the tree.

    python -P -m meshlm.kernels.gemv.tune [--folder DIR]

One row, every candidate on every shape of bench.py, and on every part of a layer that sends or receives packets. cuBLAS is given
the norm and the gate as kernels of their own.
"""

import argparse
import json
from math import exp, log
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from meshlm.kernels import tables
from meshlm.kernels.gemv.bench import PARTS, SHAPES, fitting, time_part
from meshlm.kernels.gemv.kernel import gemv
from meshlm.kernels.measure import microseconds
from meshlm.kernels.norm.kernel import add_rms_norm
from meshlm.kernels.silu_mul.kernel import silu_mul

Shape = tuple[int, int, bool, bool]  # outputs, inputs, gate, norm
Tile = tuple[int, int, int, int]
FEW, SOME, MANY = 1024, 4096, 8192
CLASSES: list[dict[str, Any]] = [
    {"inputs_to": FEW, "gate": True},
    {"inputs_to": FEW},
    {"inputs_to": SOME, "gate": True},
    {"inputs_to": 2 * FEW},
    {"inputs_to": SOME, "outputs_to": SOME},
    {"inputs_to": SOME},
    {"inputs_to": MANY},
    {},
]
WAYS: list[dict[str, Any]] = [
    {"way": "sends", "inputs_to": FEW},
    {"way": "sends", "inputs_to": 2 * FEW},
    {"way": "sends", "inputs_to": SOME, "outputs_to": SOME},
    {"way": "sends", "inputs_to": SOME},
    {"way": "sends"},
    {"way": "receives", "gate": True},
    {"way": "receives"},
]


def tiles_of_parts(times: dict[tuple[int, int, int, bool, str], dict[Tile, float]]) -> list[dict[str, Any]]:
    """The same for products that send or receive packets."""
    entries, left = [], dict(times)
    for where in WAYS:
        mine = [
            part
            for part in left
            if part[4] == where["way"]
            and part[1] <= where.get("outputs_to", part[1])
            and part[2] <= where.get("inputs_to", part[2])
            and part[3] >= where.get("gate", False)
        ]
        found = [left.pop(part) for part in mine]
        if found:
            entries.append({**where, "tile": list(best(found))})
    return entries


def best(found: list[dict[Tile, float]]) -> Tile:
    """Chooses the shape with the least geometric mean of its slowdown over all cases that it fits."""

    def cost(tile: Tile) -> float:
        return exp(sum(log(of[tile] / min(of.values())) for of in found) / len(found))

    return min(sorted(set.intersection(*(set(of) for of in found))), key=cost)


def tiles(times: dict[Shape, dict[Tile, float]]) -> list[dict[str, Any]]:
    """The best tile of each class of shapes by the geometric mean; a class that no shape is in falls through to the next."""
    left = dict(times)
    entries = []
    for where in CLASSES:
        mine = [
            shape
            for shape in left
            if shape[0] <= where.get("outputs_to", shape[0])
            and shape[1] <= where.get("inputs_to", shape[1])
            and shape[2] == where.get("gate", shape[2])
        ]
        found = [left.pop(shape) for shape in mine] or (list(times.values()) if not where else [])
        if found:
            entries.append({**where, "tile": list(best(found))})
    return entries


def most_bytes(wins: dict[int, bool]) -> int:
    """The largest weight for which gemv pays, by {bytes: gemv won}: half-way between the last win and the first loss after it."""
    won = max((size for size, did in wins.items() if did), default=0)
    lost = min((size for size, did in wins.items() if not did and size > won), default=2 * won)
    return (won + lost) // 2


def time_shape(shape: Shape) -> tuple[dict[Tile, float], float]:
    """Microseconds of each tile, and of cuBLAS with what the kernel brings along."""
    outputs, inputs, gate, norm = shape
    lines = outputs * (2 if gate else 1)
    copies = max(4, (256 << 20) // (lines * inputs * 2))
    weights = torch.randn(copies, lines, inputs, device="cuda", dtype=torch.bfloat16)
    x, residual = torch.randn(2, 1, inputs, device="cuda", dtype=torch.bfloat16)
    norm_weight = torch.ones(inputs, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"norm": norm_weight, "residual": residual, "eps": 1e-6} if norm else {}
    found = {}
    for tile in fitting(inputs, gate):

        def run(chosen: Tile = tile) -> None:
            for weight in weights:
                gemv(x, weight, gate="silu" if gate else "", shape=chosen, **options)

        found[tile] = microseconds(run, 5) / copies

    def library() -> None:
        for weight in weights:
            out = F.linear(add_rms_norm(x, residual, norm_weight, 1e-6) if norm else x, weight)
            if gate:
                silu_mul(out)

    return found, microseconds(library, 5) / copies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="of the table; default: tables/ beside this file")
    arguments = parser.parse_args()
    times: dict[Shape, dict[Tile, float]] = {}
    wins: dict[int, bool] = {}
    for shape in SHAPES:
        times[shape], library = time_shape(shape)
        size = shape[0] * shape[1] * (2 if shape[2] else 1) * 2
        wins[size] = wins.get(size, True) and min(times[shape].values()) < library
        print(shape, f"gemv {min(times[shape].values()):.2f} us, cuBLAS {library:.2f} us", flush=True)
    parts = {part: time_part(part, tune=True) for part in PARTS}
    found = {"most_bytes": most_bytes(wins), "tiles": tiles_of_parts(parts) + tiles(times)}
    found["in_steps"] = (tables.own("gemv") or {}).get("in_steps", [])  # whole steps found those (--tune full)
    path = tables.write("gemv", found, arguments.folder)
    print(path, json.dumps(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
