"""`meshlm collect-env`: what a bug report needs to say about this machine."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

from meshlm import __version__

PACKAGES = [
    "torch",
    "triton",
    "pyzmq",
    "msgspec",
    "uvloop",
    "starlette",
    "uvicorn",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "structlog",
]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    commands.add_parser("collect-env", help="print what a bug report needs")


def run(arguments: argparse.Namespace) -> int:
    for name, value in facts().items():
        print(f"{name:<14} {value}")
    return 0


def facts() -> dict[str, str]:
    """Versions and hardware, by name."""
    found = {
        "meshlm": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} usable",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        "gpu": _gpu(),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _gpu() -> str:
    """The driver's lines about GPUs; nvidia-smi is enough and needs no CUDA context."""
    if shutil.which("nvidia-smi") is None:
        return "none (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return "; ".join(done.stdout.strip().splitlines())
