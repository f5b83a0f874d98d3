"""The communication check: processes that sum one number over torch.distributed, one for each GPU, or two on the CPU.

A driver or a network that is broken hangs here, and not in the first request: the check has a limit. Those processes alone import
torch.

They meet at a file, and their sockets are of the loopback interface, as those of a mesh on one host: a TCPStore would listen on all
addresses of this host for as long as the check takes, and let in anybody.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from meshlm.supervisor.doctor.findings import Finding, failed, ok

LIMIT_S = 90.0
_PROGRAM = """
import datetime, sys, torch
from torch import distributed
backend, rank, count, file, limit_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
distributed.init_process_group(
    backend, init_method="file://" + file, rank=rank, world_size=count, timeout=datetime.timedelta(seconds=limit_s)
)
numbers = torch.full((128,), float(rank + 1), device=device)
distributed.all_reduce(numbers)
expected = count * (count + 1) / 2
if not bool((numbers == expected).all()):
    sys.exit(f"the sum over {count} processes is {numbers[0].item()}, and must be {expected}")
distributed.destroy_process_group()
"""
GPU_ADVICE = (
    "drivers or hardware between the GPUs are broken: try NCCL_DEBUG=INFO to see where, NCCL_P2P_DISABLE=1 as a stopgap, and look at "
    "ACS and IOMMU settings, /dev/shm and docker's --ipc"
)
CPU_ADVICE = "processes of this host cannot reach each other over the loopback interface: look at the firewall and GLOO_SOCKET_IFNAME"


def finding(num_gpus: int, limit_s: float = LIMIT_S) -> Finding:
    """Sums over all GPUs, or over two processes of the CPU where there is none."""
    backend, count = ("nccl", num_gpus) if num_gpus else ("gloo", 2)
    name = f"communication ({backend})"
    command = [sys.executable, "-P", "-c", _PROGRAM, backend]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshlm-doctor-") as folder:  # of this user alone
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(count), f"{folder}/store", str(limit_s)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(os.environ),
            )
            for rank in range(count)
        ]
        problem = _wait(processes, begun + limit_s)
    if problem:
        return failed(name, problem, GPU_ADVICE if num_gpus else CPU_ADVICE)
    return ok(name, f"{count} processes sum in {time.monotonic() - begun:.1f} s, with the start of torch")


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The variables of those processes: what somebody chose for their sockets counts."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**loopback, **ours, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


def _wait(processes: Sequence["subprocess.Popen[str]"], until: float) -> str:
    """Why it did not work, "" when it did. All have ended then."""
    problem = ""
    try:
        for rank, process in enumerate(processes):
            _, said = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode:
                lines = said.strip().splitlines()
                problem = problem or f"rank {rank}: {lines[-1] if lines else f'ended with {process.returncode}'}"
    except subprocess.TimeoutExpired:
        problem = problem or "it hangs: the sum did not come within the limit"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
    return problem
