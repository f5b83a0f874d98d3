"""Products of one row against the time of reading the weight, on the GPU that is there, and against cuBLAS.

    python -P -m meshlm.kernels.gemv.bench [--tune] [--parts [NTH ...]] [--json FILE]

Many copies of each weight take turns, so that none is read from the cache.
"""

import argparse
import itertools
import json
from collections import Counter
from math import log2
from typing import Any

import torch
import torch.nn.functional as F
import triton

from meshlm.kernels.allreduce_rmsnorm.kernel import Workspace
from meshlm.kernels.gemv.kernel import Turn, fold_of, gemv, parts_of, shape_of
from meshlm.kernels.measure import keep, microseconds

# outputs, inputs, gate, norm; Qwen3-0.6B, then Llama-3.1-8B
SHAPES = [
    (4096, 1024, False, True),
    (1024, 2048, False, False),
    (3072, 1024, True, True),
    (1024, 3072, False, False),
    (6144, 4096, False, True),
    (4096, 4096, False, False),
    (14336, 4096, True, True),
    (4096, 14336, False, False),
    # one of two ranks (Llama-3.1-8B)
    (3072, 4096, False, False),
    (4096, 2048, False, False),
    (7168, 4096, True, False),
    (4096, 7168, False, False),
]
# ranks, outputs, inputs, gate, way: a layer of Llama-3.1-8B on two and on four GPUs, with packets sent or received
PARTS = [
    (2, 4096, 2048, False, "sends"),
    (2, 4096, 7168, False, "sends"),
    (2, 7168, 4096, True, "receives"),
    (2, 3072, 4096, False, "receives"),
    (2, 64128, 4096, False, "sends"),
    (4, 4096, 1024, False, "sends"),
    (4, 4096, 3584, False, "sends"),
    (4, 3584, 4096, True, "receives"),
    (4, 1536, 4096, False, "receives"),
    (4, 32064, 4096, False, "sends"),
]
# BLOCK_N, warps, stages, programs per multiprocessor
WANTED = 128 << 10  # bytes; tiles that whole steps have chosen have 64 to 192 KiB under way
CHOICES = list(itertools.product((1, 2, 4, 8, 16), (4, 8), (2, 3, 4), (1, 2, 4)))


def fitting(inputs: int, gate: bool, way: str = "") -> list[tuple[int, int, int, int]]:
    """The tiles of which not too few are in flight, and which have room in a multiprocessor's shared memory."""
    lines = 2 if gate or way == "sends" else 1
    return [c for c in CHOICES if 32 << 10 <= under_way(c, inputs, lines, way) <= 224 << 10]


def under_way(tile: tuple[int, int, int, int], inputs: int, lines: int, way: str = "") -> int:
    """Bytes of a weight of bfloat16 that the programs of a multiprocessor have asked for at a time."""
    block_n, warps, stages, programs = tile
    return lines * block_n * sum(parts_of(inputs, fold_of(warps, 2), way)) * 2 * (stages - 1) * programs


def likely(inputs: int, gate: bool, each: int) -> list[tuple[int, int, int, int]]:
    """Of tiles with as many outputs and warps the `each` whose programs together have most nearly WANTED bytes under way on a
    multiprocessor; those first that are nearest."""
    lines = 2 if gate else 1
    near = sorted(fitting(inputs, gate), key=lambda c: abs(log2(under_way(c, inputs, lines) / WANTED)))
    taken: Counter[tuple[int, int]] = Counter()
    found = []
    for choice in near:
        taken[choice[:2]] += 1
        if taken[choice[:2]] <= each:
            found.append(choice)
    return found


def turn_alone(size: int, columns: int) -> tuple[Turn, object]:
    """A turn whose packets have all come, in a room with peers that are memory of this GPU (no link takes part); and that memory."""
    inbox, other = (torch.full((2, size, 1, columns // 2), 1 << 32, dtype=torch.int64, device="cuda") for _ in range(2))
    addresses = torch.tensor([inbox.data_ptr()] + [other.data_ptr()] * (size - 1), device="cuda")
    turns = torch.ones(1, dtype=torch.int32, device="cuda")
    return Turn(Workspace(0, size, 1, columns, (addresses, addresses, addresses), turns, 1), 0), (inbox, other)


def time_part(part: tuple[int, int, int, bool, str], tune: bool) -> dict[tuple[int, int, int, int], float]:
    """Microseconds of each tile; the table's first."""
    size, outputs, inputs, gate, way = part
    lines = outputs * (2 if gate else 1)
    copies = max(4, (256 << 20) // (lines * inputs * 2))
    weights = torch.randn(copies, lines, inputs, device="cuda", dtype=torch.bfloat16)
    x, residual = torch.randn(2, 1, inputs, device="cuda", dtype=torch.bfloat16)
    turn, _kept = turn_alone(size, outputs if way == "sends" else inputs)
    options: dict[str, Any] = {"sends": turn}
    if way == "receives":
        options = {"receives": turn, "norm": torch.ones_like(x[0]), "residual": residual, "eps": 1e-6}
    found: dict[tuple[int, int, int, int], float] = {}
    for choice in [shape_of(outputs, inputs, gate, way), *(fitting(inputs, gate, way) if tune else [])]:

        def run(c: tuple[int, int, int, int] = choice) -> None:
            for weight in weights:
                gemv(x, weight, gate="silu" if gate else "", shape=c, **options)

        try:
            found.setdefault(choice, microseconds(run, 5) / copies)
        except triton.runtime.errors.OutOfResources:
            continue
    return found


def bench_part(part: tuple[int, int, int, bool, str], tune: bool) -> dict[str, Any]:
    found = time_part(part, tune)
    result: dict[str, Any] = dict(zip(("ranks", "outputs", "inputs", "gate", "way"), part, strict=True))
    default = next(iter(found.values()))
    result["default_us"] = round(default, 2)
    result["tb_s"] = round(part[1] * part[2] * (4 if part[3] else 2) / default / 1e6, 2)
    if tune:
        result["best"] = [(round(us, 2), choice) for choice, us in sorted(found.items(), key=lambda pair: pair[1])[:6]]
    return result


def bench(shape: tuple[int, int, bool, bool], tune: bool) -> dict[str, Any]:
    outputs, inputs, gate, norm = shape
    lines = outputs * (2 if gate else 1)
    copies = max(4, (256 << 20) // (lines * inputs * 2))
    weights = torch.randn(copies, lines, inputs, device="cuda", dtype=torch.bfloat16)
    x, residual = torch.randn(2, 1, inputs, device="cuda", dtype=torch.bfloat16)
    norm_weight = torch.ones(inputs, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"norm": norm_weight, "residual": residual, "eps": 1e-6} if norm else {}
    choices = [shape_of(outputs, inputs, gate)]
    if tune:
        choices += fitting(inputs, gate)
    found = []
    for choice in choices:

        def run(c: tuple[int, int, int, int] = choice) -> None:
            for weight in weights:
                gemv(x, weight, gate="silu" if gate else "", shape=c, **options)

        try:
            found.append((microseconds(run, 5) / copies, choice))
        except triton.runtime.errors.OutOfResources:
            continue

    def library() -> None:
        for weight in weights:
            F.linear(x, weight)

    result: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "gate": gate}
    result["default_us"] = round(found[0][0], 2)
    result["tb_s"] = round(lines * inputs * 2 / found[0][0] / 1e6, 2)
    result["cublas_us"] = round(microseconds(library, 5) / copies, 2)
    if tune:
        result["best"] = [(round(us, 2), choice) for us, choice in sorted(found)[:4]]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))))
    parser.add_argument("--parts", type=int, nargs="*", help="these of PARTS too; without numbers: all, and no SHAPES")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = []
    for shape in arguments.shapes if arguments.parts != [] else []:
        results.append(bench(SHAPES[shape], arguments.tune))
        print(json.dumps(results[-1]), flush=True)
    for nth in [] if arguments.parts is None else arguments.parts or range(len(PARTS)):
        results.append(bench_part(PARTS[nth], arguments.tune))
        print(json.dumps(results[-1]), flush=True)
    keep(results, arguments.json)


if __name__ == "__main__":
    main()
