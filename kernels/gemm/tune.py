"""Finds which of cuBLAS's algorithms are faster than its first choice, for a model's products on this GPU; keeps them in the tree.

    python -P -m meshlm.kernels.gemm.tune CONFIG.json ... [--tp 1 2 4] [--products qkv o] [--folder DIR] [--json FILE]

CONFIG.json is a checkpoint's. Entries of other sizes stay. Candidates take turns, each for as long as the power limit needs to show;
those far behind leave after the first turn. What is not clearly faster than torch's call is not entered.
"""

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.gemm.cublaslt import Products
from meshlm.kernels.gemm.kernel import ADDED_ROWS
from meshlm.kernels.measure import keep, replay_us

ROWS = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
ROWS += [1536, 2048, 2560, 3072, 3584, 4096, 6144, 8192, 12288, 16384]
DOWN_TO = 0.85  # a choice is for rows from so much of those it was tuned for
LARGE = 1024  # rows from which power is the limit
TURN_S, LARGE_TURN_S = 0.01, 0.06
TURNS = 3
FAR = 1.04  # times the fastest
GAIN = 0.985  # of the time of torch's call, at most
WEIGHT_BYTES = 200 << 20  # copies of a small weight fill the L2 cache many times: a model's layers do
PRODUCTS = ("qkv", "o", "gate_up", "down")  # of a layer, as in `shapes`
ADDING = ("o", "down")  # to the stream, where they are whole and have many rows
Shape = tuple[int, int]  # outputs, inputs
Timed = dict[tuple[int, ...], float]  # microseconds by config; () is torch's call


def shapes(config: dict[str, Any], ranks: int) -> list[Shape]:
    """The shapes of the four products of a layer, on each of so many tensor-parallel ranks."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, dim = config.get("num_key_value_heads", heads), config.get("head_dim") or hidden // heads
    mine, inner = heads // ranks * dim, config["intermediate_size"] // ranks
    return [(mine + 2 * max(1, kv_heads // ranks) * dim, hidden), (hidden, mine), (2 * inner, hidden), (hidden, inner)]


def choose(times: dict[int, Timed]) -> list[list[Any]]:
    """Entries of a table, by rows. What is between the last choice and 0.85 of the next rows is torch's."""
    found, before = [], 0
    for rows, timed in sorted(times.items()):
        best = min(timed, key=timed.__getitem__)
        if best and timed[best] <= GAIN * timed[()]:
            found.append([max(before, int(DOWN_TO * rows)), rows, list(best)])
        before = rows
    return found


def time_all(products: Products, rows: int, shape: Shape, *, adds: bool = False) -> Timed:
    """Median microseconds of each algorithm, in turns. adds: to what there is."""
    outputs, inputs = shape
    weights = weights_of(shape)
    copies = len(weights)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(rows, outputs, device="cuda", dtype=torch.bfloat16)
    runs: dict[tuple[int, ...], Callable[[Tensor], object]] = {
        (): lambda w: out.addmm_(x, w.t()) if adds else F.linear(x, w)
    }
    for algorithm in products.algorithms(rows, outputs, inputs):
        runs[algorithm.config] = lambda w, a=algorithm: products.run(x, w, out, a, add=adds)  # type: ignore[misc]
    graphs = {}
    for config, run in runs.items():
        try:
            graphs[config] = captured(run, weights)
        except RuntimeError as error:
            print("skipped", rows, shape, config, str(error)[:60])
    turn_s = LARGE_TURN_S if rows >= LARGE else TURN_S
    repeats = max(2, int(turn_s * 1e6 / replay_us(graphs[()], 2)))
    taken: dict[tuple[int, ...], list[float]] = {config: [] for config in graphs}
    for turn in range(TURNS):
        first = {config: times[0] for config, times in taken.items() if times}
        for config, graph in graphs.items():
            if turn and config and first[config] > FAR * min(first.values()):
                continue
            taken[config].append(replay_us(graph, repeats) / copies)
    return {config: sorted(times)[len(times) // 2] for config, times in taken.items() if len(times) == TURNS}


def weights_of(shape: Shape) -> list[Tensor]:
    """Enough of them that each comes from memory."""
    copies = max(2, min(16, WEIGHT_BYTES // (2 * shape[0] * shape[1])))
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]


def captured(run: Callable[[Tensor], object], weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    """A run with each of the weights."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=PRODUCTS, metavar="NAME")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--folder", type=Path, help="where the table is kept; default: kernels/gemm/tables")
    parser.add_argument("--json", help="all times")
    arguments = parser.parse_args()
    products = Products(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    kept = {(each["outputs"], each["inputs"]): each for each in (tables.own("gemm") or {"products": []})["products"]}
    report = []
    for path in arguments.configs:
        config = json.loads(path.read_text())
        for ranks, name in product(arguments.tp, arguments.products):
            shape = shapes(config, ranks)[PRODUCTS.index(name)]
            adds = ranks == 1 and name in ADDING
            times = {rows: time_all(products, rows, shape, adds=adds and rows >= ADDED_ROWS) for rows in arguments.rows}
            kept[shape] = {"outputs": shape[0], "inputs": shape[1], "rows": choose(times)}
            for rows, timed in times.items():
                best = min(timed.values())
                flop = 2 * rows * shape[0] * shape[1]
                line = {"rows": rows, "outputs": shape[0], "inputs": shape[1], "torch_us": round(timed[()], 2)}
                report.append({**line, "us": round(best, 2), "tflop_s": round(flop / best / 1e6)})
                print(json.dumps(report[-1]), flush=True)
            tables.write("gemm", {"products": [kept[each] for each in sorted(kept)]}, arguments.folder)
    keep(report, arguments.json)


if __name__ == "__main__":
    main()
