"""CUDA graphs of what is launched again and again in a few shapes, beside the steps' own (dispatcher.py): a shape has one from its
third launch on. Used by the stepper thread."""

from collections import Counter
from collections.abc import Callable, Hashable

import structlog
import torch

from meshlm.workers.graphs.dispatcher import Recorder

_log = structlog.get_logger()
PATIENCE = 2  # launches of a shape before it is captured


class Replays:
    def __init__(self, recorder: Recorder | None) -> None:
        """None: without graphs."""
        self._recorder = recorder
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._launched: Counter[Hashable] = Counter()

    def run(self, shape: Hashable | None, launch: Callable[[], None]) -> None:
        """Launches it, or replays its graph: what it reads and writes is where it was. None: a shape that hardly comes again."""
        if (graph := self._graphs.get(shape)) is not None:
            graph.replay()
            return
        launch()
        if self._recorder is None or shape is None:
            return
        self._launched[shape] += 1
        if self._launched[shape] == PATIENCE:
            self._capture(self._recorder, shape, launch)

    def _capture(self, recorder: Recorder, shape: Hashable, launch: Callable[[], None]) -> None:
        try:
            self._graphs[shape] = recorder.record(launch)
        except RuntimeError as error:  # no memory, or what a driver does not capture: it is launched one by one
            torch.cuda.synchronize()
            _log.warning("drafts have no CUDA graph", shape=str(shape), reason=str(error).splitlines()[0])

    def forget(self) -> None:
        """All graphs are gone, and captured anew when their shapes come again."""
        self._graphs.clear()
        self._launched.clear()
        if self._recorder is not None:
            self._recorder.forget()
