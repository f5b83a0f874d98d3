"""How kernels are timed (bench.py, tuning/), and how their figures are kept."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def microseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median over graph replays: no launch cost."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            run()
    times = [replay_us(graph) / 5 for _ in range(repeats)]
    return sorted(times)[len(times) // 2]


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 1) -> float:
    """One replay of several, one behind the other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats


def report(found: Iterable[dict[str, Any]], path: str | None, **facts: Any) -> None:
    """Print figures as they are measured, a line each; and keep them."""
    results = []
    for each in found:
        results.append(each)
        print(json.dumps(each), flush=True)
    keep(results, path, **facts)


def keep(results: list[Any], path: str | None, **facts: Any) -> None:
    """Write them, with the GPU they are of, if there is a path."""
    if path:
        versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(path).write_text(json.dumps({**versions, **facts, "results": results}, indent=1))
