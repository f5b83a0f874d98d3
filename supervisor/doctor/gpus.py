"""Checks of drivers, libraries and GPUs. What torch says is asked of a process of its own: its import takes seconds, and a broken
driver can hang it.

The communication check has processes sum one number over torch.distributed, one for each GPU, or two on the CPU: a driver or a
network that is broken hangs there within a limit, and not in the first request. Those processes alone import torch. They meet at a
file, and their sockets are of the loopback interface, as those of a mesh on one host: a TCPStore would
listen on all addresses of this host.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from meshlm.runtime import nvidia_smi
from meshlm.supervisor.doctor.findings import Finding, failed, ok, skipped, warning

PACKAGES = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (4, 0))}  # from, and before
DRIVERS = {13: 580, 12: 525}  # CUDA's major version: the oldest driver that runs it
ASK_S = 60.0
MIN_CAPABILITY = (8, 0)
_PROBE = """
import json, torch
there = torch.cuda.is_available()
count = torch.cuda.device_count() if there else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
print(json.dumps({
    "cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version()) if there else [],
    "gpus": [{"name": g.name, "capability": [g.major, g.minor], "memory": g.total_memory} for g in gpus],
    "free": [torch.cuda.mem_get_info(i)[0] for i in range(count)],
    "peers": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)],
}))
"""


def findings() -> tuple[list[Finding], int]:
    """They, and how many GPUs can be used."""
    found = [package(name, version_of(name)) for name in PACKAGES]
    driver_version = _driver()
    asked = _ask_torch()
    found.append(driver(driver_version, asked.get("cuda")))
    found += gpus(asked, driver_version is not None)
    return found, len(asked.get("gpus", ()))


def package(name: str, version: str) -> Finding:
    least, before = PACKAGES[name]
    wanted = f"{'.'.join(map(str, least))} or newer, below {'.'.join(map(str, before))}"
    if not version:
        if name == "triton":
            return warning(name, "not installed", "GPUs need it; on a CPU it is not used")
        return failed(name, "not installed", f"pip install '{name}' ({wanted})")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])
    if not least <= numbers < before:
        return warning(name, version, f"MeshLM is tested with {wanted}")
    return ok(name, version)


def driver(version: str | None, cuda: str | None) -> Finding:
    """Whether the driver is as new as the CUDA that torch brings."""
    if version is None:
        return skipped("driver", "no NVIDIA driver (no nvidia-smi): the CPU is used")
    if cuda is None:
        found = f"{version}, and torch is built without CUDA"
        return failed("driver", found, "install a torch with CUDA: pip install torch")
    needed = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    found = f"{version}, for torch's CUDA {cuda}"
    if int(version.partition(".")[0]) < needed:
        advice = f"update it to {needed} or newer, or install the cuda-compat package of CUDA {cuda}"
        return failed("driver", found, advice)
    return ok("driver", found)


def gpus(asked: Mapping[str, Any], has_driver: bool) -> list[Finding]:
    """One line for each GPU, one for the ways between them, one for NCCL."""
    if problem := asked.get("problem"):
        advice = "torch does not work with this driver: see the lines above, and reboot after an update of it"
        return [failed("gpu", problem, advice)]
    there = asked["gpus"]
    if not there:
        if has_driver:
            text = "the driver is there, and torch sees no GPU"
            return [failed("gpu", text, "look at CUDA_VISIBLE_DEVICES, docker's --gpus, and /dev/nvidia*")]
        return [skipped("gpu", "none: --device cpu")]
    found = [_gpu(number, gpu, asked["free"][number]) for number, gpu in enumerate(there)]
    found.append(ok("nccl", ".".join(map(str, asked["nccl"]))))
    peers = asked["peers"]
    pairs = [(i, j) for i in range(len(there)) for j in range(i + 1, len(there))]
    if lacking := [f"{i}-{j}" for i, j in pairs if not peers[i][j]]:
        text, advice = f"no direct way between GPUs {', '.join(lacking)}", "prefer -dp or -pp; see nvidia-smi topo -m"
        found.append(warning("peer access", text, f"tensor parallelism is slow there: {advice}"))
    elif pairs:
        found.append(ok("peer access", "between all GPUs"))
    return found


def _gpu(number: int, gpu: Mapping[str, Any], free: int) -> Finding:
    name, capability = f"gpu {number}", tuple(gpu["capability"])
    found = f"{gpu['name']}, capability {capability[0]}.{capability[1]}, {free >> 30} of {gpu['memory'] >> 30} GiB free"
    if capability < MIN_CAPABILITY:
        return warning(name, found, "kernels are made for capability 8.0 and newer")
    if free < gpu["memory"] // 2:
        advice = "another program has more than half of it: nvidia-smi names it; --gpu-memory-utilization takes less"
        return warning(name, found, advice)
    return ok(name, found)


def version_of(name: str) -> str:
    """The version of a package, "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str | None:
    """Its version; None without one."""
    try:
        lines = nvidia_smi.query("driver_version") or [""]
    except OSError:
        return None
    return lines[0] if lines[0][:1].isdigit() else None


def _ask_torch() -> dict[str, Any]:
    """What torch sees; `problem` where it does not say."""
    command, env = [sys.executable, "-P", "-c", _PROBE], {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True, env=env)
    except subprocess.TimeoutExpired:
        return {"problem": f"torch did not answer within {ASK_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"problem": (error.stderr.strip().splitlines() or ["torch ended without a word"])[-1]}
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


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


def communication(num_gpus: int) -> Finding:
    """Sums over all GPUs, or over two processes of the CPU where there is none."""
    backend, count = ("nccl", num_gpus) if num_gpus else ("gloo", 2)
    name = f"communication ({backend})"
    command = [sys.executable, "-P", "-c", _PROGRAM, backend]
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": environment(os.environ)}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshlm-doctor-") as folder:  # of this user alone
        words = [(*command, str(rank), str(count), f"{folder}/store", str(LIMIT_S)) for rank in range(count)]
        processes = [subprocess.Popen(each, text=True, **options) for each in words]
        problem = _wait(processes, begun + LIMIT_S)
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
