"""Finds how the experts of a layer are computed the fastest on this GPU, for each number of rows; keeps that in the tree.

    python -P -m meshlm.kernels.grouped_gemm.tune CONFIG.json ... [--tp 1 2] [--ep 1] [--rows 1 64 ...] [--folder DIR] [--json FILE]

CONFIG.json is a checkpoint's. Gate and down are timed apart, with tokens that choose their experts at random and several choices one
behind the other, so that weights come from memory. Entries of other sizes, and for other numbers of rows, stay.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm import kernel as many
from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS, SHAPES, Layer, Plan
from meshlm.kernels.measure import keep, replay_us
from meshlm.kernels.moe_align.kernel import align, most_tiles
from meshlm.kernels.moe_few import kernel as few
from meshlm.kernels.moe_gemv import kernel as one
from meshlm.kernels.moe_sum.kernel import weighted_sum
from meshlm.kernels.precompile import precompiled

ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
BYTES_AT_ONCE = 400 << 20  # of weights that a graph reads, at least: many times the L2 cache
SHARED_BYTES = 226 << 10
TURN_S, TURNS = 0.004, 3
FAR = 1.08  # times the fastest of its kind
CUDA = torch.device("cuda")
Run = Callable[[], object]


class Case(NamedTuple):
    """Tokens and their experts."""

    x: Tensor
    experts: Tensor
    weights: Tensor


class Bench:
    """One layer's experts, and tokens for it."""

    def __init__(
        self, layer: Layer, rows: int, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.layer, self.rows = layer, rows
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        count, topk, hidden, wide = layer
        touched = min(count, rows * topk)
        copies = max(1, min(16, BYTES_AT_ONCE // (2 * touched * hidden * wide)))
        self.gate_up = torch.randn(count, 2 * wide, hidden, **make) * 0.02
        self.down = torch.randn(count, hidden, wide, **make) * 0.02
        self.cases = [
            Case(
                torch.randn(rows, hidden, **make),
                torch.rand(rows, count, device=device).topk(topk, dim=1).indices.to(torch.int32),
                torch.rand(rows, topk, device=device),
            )
            for _ in range(copies)
        ]
        entries = rows * topk
        most = max(entries, most_tiles(entries, count, 128) * 128)
        self.inner = torch.randn(most, wide, **make)
        self.out = torch.empty(most, hidden, **make)
        self.parts = torch.empty(topk, min(rows, PARTS_ROWS), hidden, device=device)
        self.whole = torch.empty(rows, hidden, **make)

    def gate(self, kind: str, shape: Any) -> Run:
        wide, topk = self.layer.wide, self.layer.topk

        def run() -> None:
            for x, experts, _ in self.cases:
                if kind == "one":
                    one.gate_gemv(x, self.gate_up, experts, self.inner[:topk], shape)
                elif kind == "few":
                    few.few(x, self.gate_up, experts, None, self.inner[: len(x) * topk], shape)
                else:
                    ids, _, ends, owners = align(experts, self.layer.experts, shape.block_m)
                    inner = self.inner[: len(ids)]
                    count = experts.numel()
                    many.sorted_gemm(x, self.gate_up, inner, shape, ends, ids, topk, count, gate=True, owners=owners)

        assert wide == self.inner.shape[1]
        return run

    def down_run(self, kind: str, shape: Any) -> Run:
        topk = self.layer.topk

        def run() -> None:
            for x, experts, weights in self.cases:
                if kind == "one":
                    one.down_gemv(self.inner[:topk], self.down, experts, weights, self.whole, shape)
                elif kind == "few":
                    few.few(self.inner[: len(x) * topk], self.down, experts, weights, self.parts, shape)
                else:
                    ids, positions, ends, owners = align(experts, self.layer.experts, shape.block_m)
                    inner, entries = self.inner[: len(ids)], experts.numel()
                    if self.rows <= PARTS_ROWS:
                        parts, to = self.parts, many.Parts(experts, weights)
                        many.sorted_gemm(inner, self.down, parts, shape, ends, ids, topk, entries, parts=to)
                        continue
                    out = self.out[: len(ids)]
                    many.sorted_gemm(inner, self.down, out, shape, ends, entries=entries, owners=owners)
                    weighted_sum(out, positions, weights, self.whole)

        return run

    def aligned_us(self, block_m: int) -> float:
        """The time of ordering the rows alone, which both products are timed with."""

        def run() -> None:
            for _, experts, _ in self.cases:
                align(experts, self.layer.experts, block_m)

        (found,) = self.timed([run], [None]).values()
        return found

    def timed(self, runs: list[Run], kinds: list[object]) -> dict[int, float]:
        """Microseconds of one case, by number of the run; without those that cannot be launched, or are far behind their kind."""
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for nth, run in enumerate(runs):
            try:
                run()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                graphs[nth] = graph
            except Exception as error:  # Triton's errors have no class in common with the driver's
                print("skipped", nth, type(error).__name__, str(error)[:80], flush=True)
        if not graphs:
            return {}
        repeats = max(1, int(TURN_S * 1e6 / max(1.0, replay_us(next(iter(graphs.values())), 2))))
        taken: dict[int, list[float]] = {nth: [] for nth in graphs}
        for turn in range(TURNS):
            best: dict[object, float] = {}
            for nth, times in taken.items():
                if times:
                    best[kinds[nth]] = min(times[0], best.get(kinds[nth], times[0]))
            for nth, graph in graphs.items():
                if not turn or taken[nth][0] <= FAR * best[kinds[nth]]:
                    taken[nth].append(replay_us(graph, repeats) / len(self.cases))
        return {nth: sorted(times)[len(times) // 2] for nth, times in taken.items() if len(times) == TURNS}


def candidates(layer: Layer, rows: int, *, gate: bool) -> Iterator[tuple[str, Any]]:
    """Kinds of kernel, and tiles that fit."""
    halves, inputs = (2, layer.hidden) if gate else (1, layer.wide)
    if rows == 1:
        if not gate:
            yield from (("one", one.Shape(*sizes)) for sizes in product((1, 2, 4), (4, 8)))
        for block_n, warps, stages, programs in product((1, 2, 4), (4, 8), (3, 4), (2, 4)) if gate else ():
            line = halves * block_n * (1 << (inputs - 1).bit_length()) * 2
            if line * stages * programs <= SHARED_BYTES:
                yield "one", one.Shape(block_n, warps, stages, programs)
    if rows <= few.MOST_ROWS:
        block_m = max(16, 1 << (rows - 1).bit_length())
        for block_n, block_k, stages in product((16, 32, 64), (64, 128, 256), (3, 5)):
            size = (block_m + halves * block_n) * block_k * 2 * stages
            if (block_n * block_k <= 8192) and 12 << 10 <= size <= SHARED_BYTES // 2:
                yield "few", few.Shape(block_n, block_k, 4, stages)
    each = rows * layer.topk / layer.experts
    if rows > PARTS_ROWS and each >= 8:
        yield from (("many", many.Shape(128, 128, 64, 4, stages, apart=True)) for stages in (3, 4))
    if rows >= 32:
        for block_m in (16, 32, 64, 128):
            if block_m <= max(16, 2.5 * each) and (block_m >= 64 or each <= 48):
                yield from (("many", shape) for shape in _many(block_m, gate=gate))


# Columns of a tile (a gate's and up's together), inputs, warps, stages, programs on a multiprocessor, tiles by one reading.
WIDE_TILES = {
    16: """64 128 4 4 2 1, 128 128 4 3 2 1, 128 128 4 4 2 1, 128 64 4 5 2 1, 128 64 4 7 2 1, 256 64 4 3 2 1, 256 64 4 4 2 1,
        128 128 8 4 2 1, 64 256 4 3 2 1, 64 256 4 5 1 1, 128 256 8 3 1 1, 32 256 4 4 3 1, 32 512 4 3 2 1, 32 256 4 5 2 1,
        64 128 4 4 2 2, 128 128 4 3 2 2""",
    32: "64 128 4 4 2 1, 128 128 4 3 2 1, 128 64 4 5 2 1, 128 64 4 6 2 1, 128 64 4 4 3 1, 256 64 4 3 2 1, 64 256 4 3 2 1",
    64: """128 64 4 4 1 1, 128 64 4 4 2 1, 256 64 4 4 1 1, 128 128 4 3 1 1, 256 64 8 4 1 1, 128 64 4 2 2 2, 128 64 4 3 2 2,
        256 64 8 3 1 2, 256 64 8 4 1 2, 256 128 8 2 1 2, 128 64 4 2 2 3, 128 64 8 4 1 3, 256 64 8 3 1 3""",
    128: """256 64 8 3 1 1, 256 64 8 4 1 1, 128 64 8 4 1 1, 128 64 4 4 1 1, 128 64 8 3 1 2, 128 64 8 4 1 2, 128 64 4 2 2 1,
        128 64 4 3 2 1""",
}


def _many(block_m: int, *, gate: bool) -> Iterator[many.Shape]:
    """The shapes that are tried: programs with several tiles each, and with one."""
    for sizes in WIDE_TILES[block_m].split(","):
        columns, block_k, warps, stages, programs, tiles = map(int, sizes.split())
        block_n = columns // 2 if gate else columns
        buffers = (
            stages if block_m >= 64 else stages - 1
        )  # small tiles have no product that works on while the next one is loaded
        size = (block_m * tiles + columns) * block_k * buffers * 2
        if (size + block_m * block_n * 2 * (block_m >= 64) + (2 << 10)) * programs > SHARED_BYTES:
            continue
        yield many.Shape(block_m, block_n, block_k, warps, stages, False, programs, tiles)
        if block_m >= 64 and programs == tiles == 1:
            yield many.Shape(block_m, block_n, block_k, warps, stages, True)


def _kind(kind: str, shape: Any) -> tuple[str, int]:
    """What gate and down must have in common: the kernel, and sorted the height of tiles."""
    return kind, shape.block_m if kind == "many" else 0


def tune(layer: Layer, rows: int) -> tuple[Plan, dict[str, Any]]:
    """The best pair of one kind and, sorted, of one height of tiles."""
    bench = Bench(layer, rows)
    gates, downs = (list(candidates(layer, rows, gate=gate)) for gate in (True, False))
    gate_runs = [bench.gate(*each) for each in gates]
    down_runs = [bench.down_run(*each) for each in downs]
    with precompiled():
        for run in (*gate_runs, *down_runs):
            run()
    torch.cuda.synchronize()
    gate_us = bench.timed(gate_runs, [_kind(*each) for each in gates])
    down_us = bench.timed(down_runs, [_kind(*each) for each in downs])
    best: dict[tuple[str, int], list[tuple[float, Any]]] = {}
    for found, known in ((gate_us, gates), (down_us, downs)):
        fastest: dict[tuple[str, int], tuple[float, Any]] = {}
        for nth, us in found.items():
            kind, shape = known[nth]
            key = _kind(kind, shape)
            if us < fastest.get(key, (float("inf"), None))[0]:
                fastest[key] = (us, shape)
        for key, value in fastest.items():
            best.setdefault(key, []).append(value)
    totals = {
        key: sum(us for us, _ in pair) - (bench.aligned_us(key[1]) if key[0] == "many" else 0.0)
        for key, pair in best.items()
        if len(pair) == 2
    }
    key = min(totals, key=totals.__getitem__)
    (gate, gate_shape), (down, down_shape) = best[key]
    report = {"rows": rows, **layer._asdict(), "kind": key[0], "us": round(totals[key], 2), "gate_us": round(gate, 2)}
    report |= {
        "down_us": round(down, 2),
        "gate": gate_shape,
        "down": down_shape,
        **figures(layer, rows, totals[key], bench),
    }
    report["others"] = {f"{kind} {block}": round(us, 2) for (kind, block), us in totals.items()}
    return Plan(key[0], gate_shape, down_shape), report


def figures(layer: Layer, rows: int, us: float, bench: Bench) -> dict[str, float]:
    """TB/s of the weights of experts that were touched, and TFLOP/s."""
    touched = sum(len(case.experts.unique()) for case in bench.cases) / len(bench.cases)
    weights = 3 * 2 * touched * layer.hidden * layer.wide
    flop = 2 * 3 * rows * layer.topk * layer.hidden * layer.wide
    return {"tb_s": round(weights / us / 1e6, 2), "tflop_s": round(flop / us / 1e6, 1)}


def layer_of(config: dict[str, Any], tp: int, ep: int) -> Layer:
    """The layer of a config.json, on one of so many ranks."""
    count = config.get("num_experts") or config.get("num_local_experts") or config["n_routed_experts"]
    wide = config.get("moe_intermediate_size") or config["intermediate_size"]
    return Layer(count // ep, config["num_experts_per_tok"], config["hidden_size"], wide // tp)


def entries(found: dict[int, Plan]) -> list[list[Any]]:
    """The entries of a table: rows between two sizes are the larger one's."""
    sizes = sorted(found)
    return [
        [before, rows, found[rows].kind, list(found[rows].gate), list(found[rows].down)]
        for before, rows in zip([0, *sizes], sizes, strict=False)
    ]


def write(layer: Layer, found: dict[int, Plan], folder: Path | None = None) -> None:
    """Into the table; what it knows of other layers stays, and of this one what is for other numbers of rows."""
    known = (tables.own("grouped_gemm") or {"layers": []})["layers"]
    kept = {tuple(each[name] for name in Layer._fields): each for each in known}
    before = {
        to: Plan(kind, SHAPES[kind](*gate), SHAPES[kind](*down))
        for _, to, kind, gate, down in kept.get(layer, {"rows": []})["rows"]
    }
    kept[layer] = {**layer._asdict(), "rows": entries({**before, **found})}
    tables.write("grouped_gemm", {"layers": [kept[each] for each in sorted(kept)]}, folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--ep", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--folder", type=Path, help="where the table is kept; default: kernels/grouped_gemm/tables")
    parser.add_argument("--json", help="the times")
    arguments = parser.parse_args()
    report = []
    for path, tp, ep in product(arguments.configs, arguments.tp, arguments.ep):
        layer = layer_of(json.loads(path.read_text()), tp, ep)
        found: dict[int, Plan] = {}
        for rows in arguments.rows:
            found[rows], line = tune(layer, rows)
            report.append(line)
            print(json.dumps(line), flush=True)
            write(layer, found, arguments.folder)
            keep(report, arguments.json)


if __name__ == "__main__":
    main()
