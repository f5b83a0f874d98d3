"""The bench of all kernels, on the GPU that is there: microseconds of each case of a record, and of other ways to the same.

    python -P -m meshlm.kernels.bench OP ... [--only NAME ...] [--tiles] [--json FILE]

Rates are of the bytes that must be read and written, and of the operations that must be done. --tiles: the fastest candidates, too.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.op import Case, Op, Tile, names, records

CUDA = torch.device("cuda")
BEST = 4  # candidates that are told


def measured(op: Op, case: Case, *, tiles: bool) -> dict[str, Any]:
    """One case."""
    launch = op.make(torch.bfloat16, CUDA, *case)
    us = microseconds(launch.run) / launch.copies
    line: dict[str, Any] = {"kernel": op.name, "case": [str(one) for one in case], "us": round(us, 2)}
    if launch.num_bytes:
        line["tb_s"] = round(launch.num_bytes / us / 1e6, 3)
    if launch.num_flop:
        line["tflop_s"] = round(launch.num_flop / us / 1e6, 1)
    for name, run in launch.beside.items():
        line[f"{name}_us"] = round(microseconds(run) / launch.copies, 2)
    if tiles:
        fastest = sorted(times_of(op, case).items(), key=lambda found: found[1])[:BEST]
        line["tiles"] = [[round(each, 2), tile] for tile, each in fastest]
    return line


def times_of(op: Op, case: Case, *, compiles: bool = False) -> dict[Tile, float]:
    """Microseconds of each candidate; infinity where the GPU has no room for it. compiles: each is launched once (precompile.py)."""
    found: dict[Tile, float] = {}
    for tile in op.candidates(case):
        try:
            launch = op.make(torch.bfloat16, CUDA, *case, tile=tile)
            found[tile] = launch.run() is None if compiles else microseconds(launch.run, 7) / launch.copies
        except Exception as error:
            print("left out:", tile, next(iter(str(error).splitlines()), "")[:80], flush=True)
            found[tile] = float("inf")
    return found


def lines(ops: list[str], only: list[str], *, tiles: bool) -> Iterator[dict[str, Any]]:
    """All cases of these operations, or of some of their functions."""
    for op in (op for name in ops for op in records(name) if not only or op.name in only):
        for case in op.of_models:
            yield measured(op, case, tiles=tiles)
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("ops", nargs="+", choices=names(), metavar="OP")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="functions of the operation")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    report(lines(arguments.ops, arguments.only, tiles=arguments.tiles), arguments.json)


if __name__ == "__main__":
    main()
