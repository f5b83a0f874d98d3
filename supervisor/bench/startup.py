"""`meshlm bench startup`: how long an `LLM` takes until it can be asked, with compiled kernels of earlier starts and without any.

Each start is that of a new process. A cold one keeps kernels and tuned tiles in a folder of its own, which is then removed; what a
model hub was asked for stays where it is, and so does what the operating system has read of the files.
"""

import argparse
import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshlm.supervisor.api.llm import LLM
from meshlm.supervisor.bench import results
from meshlm.supervisor.bench.results import percentiles
from meshlm.supervisor.bench.serve_flags import at_least
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.settings import flags

PERCENTILES = [10.0, 25.0, 50.0, 75.0, 90.0, 99.0]


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser("startup", help="time until a model can be asked")
    flags.add_flags(parser)
    parser.add_argument("--num-iters-cold", type=int, default=3, help="starts without kernels of earlier ones")
    parser.add_argument("--num-iters-warmup", type=int, default=1, help="starts before those with kernels, not counted")
    parser.add_argument("--num-iters-warm", type=int, default=3, help="starts with the kernels of earlier ones")
    parser.add_argument("--output-json", help="file for the results")


def run(arguments: argparse.Namespace) -> int:
    at_least(1, arguments, "num_iters_cold", "num_iters_warm")
    at_least(0, arguments, "num_iters_warmup")
    if arguments.output_json:
        results.claim("--output-json", Path(arguments.output_json))
    settings = flags.given(arguments)
    found: dict[str, Any] = {}
    for kind, count in (("cold", arguments.num_iters_cold), ("warm", arguments.num_iters_warm)):
        for _ in range(arguments.num_iters_warmup if kind == "warm" else 0):
            started(settings, {})
        seconds = [_cold(settings) if kind == "cold" else started(settings, {}) for _ in range(count)]
        found |= summary(kind, seconds)
        _print(kind, found)
    if arguments.output_json:
        results.write(Path(arguments.output_json), found)
    return 0


def summary(kind: str, seconds: list[float]) -> dict[str, Any]:
    """Seconds of starts, by the keys of `vllm bench startup`."""
    return {
        f"avg_{kind}_startup_time": sum(seconds) / len(seconds),
        f"{kind}_startup_times": seconds,
        f"{kind}_startup_percentiles": {f"{p:.0f}": value for p, value in percentiles(seconds, PERCENTILES).items()},
    }


def cold_environment(folder: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables under which a process finds no kernels of earlier ones. The hub's files lie beside the usual caches."""
    usual = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {
        "XDG_CACHE_HOME": folder,
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "HF_HOME": environment.get("HF_HOME") or str(usual / "huggingface"),
    }


def _cold(settings: dict[str, Any]) -> float:
    with TemporaryDirectory(prefix="meshlm-cold-") as folder:
        return started(settings, cold_environment(folder, os.environ))


def started(settings: dict[str, Any], environment: dict[str, str]) -> float:
    """Seconds that `LLM(**settings)` takes in a process of its own. StartError, UsageError as there."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(_start, settings, environment).result()
        except BrokenProcessPool:
            raise StartError("the process that should start the model ended; its lines above say why") from None


def _start(settings: dict[str, Any], environment: dict[str, str]) -> float:
    os.environ.update(environment)
    begun = time.perf_counter()
    llm = LLM(**settings)
    seconds = time.perf_counter() - begun
    llm.shutdown()
    return seconds


def _print(kind: str, found: dict[str, Any]) -> None:
    print(f"Avg {kind} startup time: {found[f'avg_{kind}_startup_time']:.2f} seconds")
    for percent, value in found[f"{kind}_startup_percentiles"].items():
        print(f"{percent}% percentile {kind} startup time: {value:.2f} seconds")
