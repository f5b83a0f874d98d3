"""One allreduce_rmsnorm inside a CUDA graph of many, by rows and protocol, on several GPUs of this host.

    python -P -m meshlm.kernels.allreduce_rmsnorm.bench [--gpus 2] [--columns 4096] [--rows 1 2 4 8 16 32 64] [--json FILE]

`norm_us` is the same without a sum (kernels/norm): what one GPU alone needs. The two protocols take turns.
"""

import argparse
import json
import os
import socket
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from meshlm.kernels.allreduce_rmsnorm import kernel, reference
from meshlm.kernels.measure import keep
from meshlm.kernels.norm.kernel import add_rms_norm

IN_A_GRAPH, REPLAYS, ROUNDS = 64, 20, 5


def workspace_of(rank: int, size: int, rows: int, columns: int) -> tuple[kernel.Workspace, object]:
    """A room in symmetric memory, and what must be kept while it is used."""
    import torch.distributed._symmetric_memory as symm_mem

    kept, addresses = [], []
    words = kernel.words(columns, torch.bfloat16)
    for count, dtype in (
        (2 * size * rows * words, torch.int64),
        (2 * size * rows * columns, torch.bfloat16),
        (size * rows, torch.int32),
    ):
        memory = symm_mem.empty(count, dtype=dtype, device=torch.device("cuda", rank))
        memory.zero_()
        handle = symm_mem.rendezvous(memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        kept.append((memory, handle))
        addresses.append(torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device="cuda"))
    torch.cuda.synchronize()
    dist.barrier()
    turns = torch.ones(rows, dtype=torch.int32, device="cuda")
    return kernel.Workspace(rank, size, rows, columns, (addresses[0], addresses[1], addresses[2]), turns, rows), kept


def graph_of(work: Any) -> "torch.cuda.CUDAGraph":
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            work()
    return graph


def microseconds(graph: "torch.cuda.CUDAGraph") -> float:
    """Microseconds of one call; all ranks replay at the same time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (IN_A_GRAPH * REPLAYS)


def right(rank: int, size: int, rows: int, columns: int, workspace: kernel.Workspace) -> bool:
    """Against the reference, several turns."""
    for turn in range(5):
        parts = [
            torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 * turn + k)).bfloat16().cuda()
            for k in range(size)
        ]
        residual, weight = parts[0] * 0.5, torch.linspace(0.5, 1.5, columns).bfloat16().cuda()
        wanted, stream = reference.allreduce_rmsnorm(parts, residual, weight, 1e-5)
        found = kernel.allreduce_rmsnorm(parts[rank], residual, weight, 1e-5, workspace)
        if not torch.allclose(residual, stream, atol=0.05, rtol=0.02) or (found - wanted).abs().max() > 0.1:
            return False
    return True


def measure(rank: int, size: int, port: int, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    workspace, _kept = workspace_of(rank, size, max(arguments.rows), arguments.columns)
    weight = torch.ones(arguments.columns, dtype=torch.bfloat16, device="cuda")
    results = []
    for rows in arguments.rows:
        x, residual = torch.zeros(2, rows, arguments.columns, dtype=torch.bfloat16, device="cuda")
        graphs, result = {}, {"gpus": size, "rows": rows}
        for name, upto in (("packets", workspace.rows), ("flags", 0)):
            workspace.packet_rows = upto
            result[f"{name}_right"] = right(rank, size, rows, arguments.columns, workspace)

            def work(x: Tensor = x, residual: Tensor = residual) -> None:
                kernel.allreduce_rmsnorm(x, residual, weight, 1e-5, workspace)

            graphs[name] = graph_of(work)
        graphs["norm"] = graph_of(lambda x=x, residual=residual: add_rms_norm(x, residual, weight, 1e-5))
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                times[name].append(microseconds(graph))
        result |= {f"{name}_us": round(median(found), 2) for name, found in times.items()}
        results.append(result)
        if rank == 0:
            print(json.dumps(result), flush=True)
    if rank == 0:
        keep(results, arguments.json, columns=arguments.columns)
    dist.barrier()
    os._exit(0)  # communicators need not be taken down in order


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(measure, (arguments.gpus, port, arguments), arguments.gpus)


if __name__ == "__main__":
    main()
