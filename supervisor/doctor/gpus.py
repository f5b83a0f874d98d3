"""Checks of drivers, libraries and GPUs. What torch says is asked of a process of its own: its import takes seconds, and a broken
driver can hang it."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

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
    found = [package(name, _version(name)) for name in PACKAGES]
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
        return failed(
            "driver", f"{version}, and torch is built without CUDA", "install a torch with CUDA: pip install torch"
        )
    needed = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    found = f"{version}, for torch's CUDA {cuda}"
    if int(version.partition(".")[0]) < needed:
        return failed(
            "driver", found, f"update it to {needed} or newer, or install the cuda-compat package of CUDA {cuda}"
        )
    return ok("driver", found)


def gpus(asked: Mapping[str, Any], has_driver: bool) -> list[Finding]:
    """One line for each GPU, one for the ways between them, one for NCCL."""
    if problem := asked.get("problem"):
        return [
            failed(
                "gpu",
                problem,
                "torch does not work with this driver: see the lines above, and reboot after an update of it",
            )
        ]
    there = asked["gpus"]
    if not there:
        if has_driver:
            text = "the driver is there, and torch sees no GPU"
            return [failed("gpu", text, "look at CUDA_VISIBLE_DEVICES, docker's --gpus, and /dev/nvidia*")]
        return [skipped("gpu", "none: --device cpu")]
    found = [_gpu(number, gpu, asked["free"][number]) for number, gpu in enumerate(there)]
    found.append(ok("nccl", ".".join(map(str, asked["nccl"]))))
    if len(there) > 1:
        lacking = [
            f"{i}-{j}" for i, row in enumerate(asked["peers"]) for j, there in enumerate(row) if i < j and not there
        ]
        if lacking:
            text = f"no direct way between GPUs {', '.join(lacking)}"
            found.append(
                warning(
                    "peer access", text, "tensor parallelism is slow there: prefer -dp or -pp; see nvidia-smi topo -m"
                )
            )
        else:
            found.append(ok("peer access", "between all GPUs"))
    return found


def _gpu(number: int, gpu: Mapping[str, Any], free: int) -> Finding:
    name, capability = f"gpu {number}", tuple(gpu["capability"])
    found = f"{gpu['name']}, capability {capability[0]}.{capability[1]}, {free >> 30} of {gpu['memory'] >> 30} GiB free"
    if capability < MIN_CAPABILITY:
        return warning(name, found, "kernels are made for capability 8.0 and newer")
    if free < gpu["memory"] // 2:
        return warning(
            name,
            found,
            "another program has more than half of it: nvidia-smi names it; --gpu-memory-utilization takes less",
        )
    return ok(name, found)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str | None:
    """Its version; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines and lines[0][0].isdigit() else None


def _ask_torch() -> dict[str, Any]:
    """What torch sees; `problem` where it does not say."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"torch did not answer within {ASK_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"problem": (error.stderr.strip().splitlines() or ["torch ended without a word"])[-1]}
    found: dict[str, Any] = json.loads(asked.stdout)
    return found
