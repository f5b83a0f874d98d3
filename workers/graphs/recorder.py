"""Records what is launched as a CUDA graph. Owned by the dispatcher of graphs; used by the stepper thread.

It does not decide what is recorded, nor what to do when that fails.
"""

import contextlib
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch


class Recorder:
    """All graphs share one pool of memory: only one is replayed at a time. A pool ends with its last graph."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._cuda_stream: Any = None
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()  # of the pool
        self._broken: list[torch.cuda.CUDAGraph] = []  # whose captures could not be ended: an allocator knows them

    def record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures a graph without torch.cuda.graph, which waits for the device, collects garbage and empties the allocator's cache."""
        make: Any = torch.cuda.Stream  # typed in some versions of torch only
        self._cuda_stream = self._cuda_stream or make()
        if self._pool is None or not self._graphs:  # torch takes no graph into a pool that has ended
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._cuda_stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                launch()
                graph.capture_end()
            except BaseException:
                self._break_off(graph)
                raise
        self._graphs.add(graph)
        return graph

    def forget(self) -> None:
        """All graphs are gone: the GPU has their memory back, which no capture could ask for while it lasts."""
        self._graphs.clear()
        torch.cuda.empty_cache()

    def _break_off(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed: its stream must not stay in it.

        Where CUDA refuses, torch leaves its allocators in the midst of the capture. The GPU's must be told, else it frees nothing any
        more; the host's cannot be: it goes on asking the graph, and would refuse its pool.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # it was told
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._broken.append(graph)
            self._pool = self._cuda_stream = None
