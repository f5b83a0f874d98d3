"""benchmarks/parallel.py: what each rank had of the work, from its own statistics."""

from collections.abc import Callable
from types import ModuleType

from meshlm.protocol.edges.control import GraphCounts, MeshStats, RankStats


def rank(number: int, running: int, prompt: int, output: int, steps: int) -> RankStats:
    graphs = GraphCounts({"decode": steps, "mixed": 1}, {"not_captured": 2})
    return RankStats(number, running, 0, 0.0, 0, 0, 0, prompt, output, graphs, 2_000_000_000 * steps, 5_000_000 * steps)


def test_work_is_counted_from_the_first_word_to_the_last(benchmark_module: Callable[[str], ModuleType]) -> None:
    said = [
        MeshStats(True, ranks=(rank(0, 0, 100, 7, 1), rank(1, 0, 0, 0, 0))),
        MeshStats(True, ranks=(rank(0, 5, 300, 20, 2), rank(1, 4, 256, 9, 1))),
        MeshStats(True, ranks=(rank(0, 2, 400, 57, 4), rank(1, 1, 256, 64, 2))),
    ]
    assert benchmark_module("parallel").by_rank(said) == {
        "0": {"prompt_tokens": 300, "output_tokens": 50, "most_running": 5, "busy_s": 6.0, "idle_s": 0.015, "steps": 3},
        "1": {"prompt_tokens": 256, "output_tokens": 64, "most_running": 4, "busy_s": 4.0, "idle_s": 0.01, "steps": 2},
    }
