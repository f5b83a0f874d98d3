"""The CUDA-graph dispatcher: the only place that decides whether a step is replayed, from which graph, and if not, why.

Keys are padded batch sizes of uniform decodes. Graphs are captured in idle time after start, and at the latest when a step first
needs one.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

MAX_SIZE = 1024


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then in steps that waste at most an eighth of a batch."""
    sizes = [1, 2, 4]
    for upto, step in ((128, 8), (256, 16), (512, 32), (MAX_SIZE, 64)):
        sizes += range((sizes[-1] // step + 1) * step, upto + 1, step)
    limit = min(max_num_seqs, MAX_SIZE)
    return sorted({size for size in sizes if size < limit} | {limit})


class Dispatcher:
    """`capture(size)` runs one step of that size; what it launches becomes the graph."""

    def __init__(self, sizes: list[int], capture: Callable[[int], None]) -> None:
        self.sizes = sorted(sizes)
        self.misses: Counter[str] = Counter()
        self.replays = 0
        self._capture = capture
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def padded(self, num_decodes: int) -> int:
        """The graph for so many decodes; 0 (and a counted miss) when they exceed the largest."""
        for size in self.sizes:
            if size >= num_decodes:
                return size
        self.miss("batch larger than the largest graph" if self.sizes else "CUDA graphs are off")
        return 0

    def miss(self, reason: str) -> None:
        self.misses[reason] += 1

    def replay(self, size: int) -> None:
        """Run the step of this size; its inputs are in place."""
        graph = self._graphs.get(size)
        if graph is None:
            self.misses["captured on first use"] += 1
            graph = self._make(size)
        self.replays += 1
        graph.replay()

    def background(self) -> bool:
        """Capture one more graph, the largest first (the others fit in its memory). True if some are left."""
        left = [size for size in self.sizes if size not in self._graphs]
        if left:
            self._make(left[-1])
        return len(left) > 1

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def _make(self, size: int) -> torch.cuda.CUDAGraph:
        self._capture(size)  # once outside: workspaces and libraries are allocated then
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._capture(size)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = graph
        return graph
