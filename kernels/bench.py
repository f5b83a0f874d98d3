"""The bench of all kernels, on the GPU that is there: microseconds of each case of a record, and of other ways to the same.

    python -P -m meshlm.kernels.bench OP ... [--only NAME ...] [--tiles] [--gpus N] [--json FILE]

Rates are of the bytes that must be read and written, and of the operations that must be done. --tiles: the fastest candidates, too.
--gpus: of a group with a process for each, which are timed together.
"""

import argparse
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.op import Case, Op, Tile, names, records

BEST = 4  # candidates that are told


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def measured(op: Op, case: Case, *, tiles: bool) -> dict[str, Any]:
    launch = op.make(torch.bfloat16, _device(), *case)
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
            launch = op.make(torch.bfloat16, _device(), *case, tile=tile)
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


def on_rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """One of a group; the first reports."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.gpus)
    found = lines(arguments.ops, arguments.only, tiles=arguments.tiles)
    if rank == 0:
        report(found, arguments.json, gpus=arguments.gpus)
    else:
        list(found)
    dist.barrier()
    os._exit(0)  # communicators need not be taken down in order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("ops", nargs="+", choices=names(), metavar="OP")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="functions of the operation")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.gpus == 1:
        report(lines(arguments.ops, arguments.only, tiles=arguments.tiles), arguments.json)
        return
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(on_rank, (port, arguments), arguments.gpus)


if __name__ == "__main__":
    main()
