"""Decides when CUDA graphs are captured: before the first request, and in idle time. Owned by the engine; which ones, the dispatcher
says."""

from collections.abc import Callable

import torch

from meshlm.workers.engine import ProgressReport
from meshlm.workers.graphs.dispatcher import Dispatcher


class Captures:
    """`clear` makes a step of padding of the inputs, so that what is captured computes nothing that counts."""

    def __init__(self, graphs: Dispatcher, clear: Callable[[], None]) -> None:
        self._graphs, self._clear = graphs, clear

    def next(self) -> None:
        """One more."""
        self._clear()
        with torch.inference_mode():
            self._graphs.background()

    def in_idle_time(self) -> None:
        """One more, if there is memory for it."""
        try:
            self.next()
        except torch.OutOfMemoryError as error:
            self._graphs.abandon(error)

    def all(self, report: ProgressReport) -> None:
        """All ranks of a group must have the same graphs: none may do without one for want of memory."""
        total = len(self._graphs.keys)
        for done in range(total):
            self.next()
            report("CUDA graphs", done + 1, total, "")

    def together(self, *, everything: bool) -> None:
        """The first ones of ranks that step together; they have the others when their steps ask for them, all at once too."""
        for key in self._graphs.first(everything=everything):
            self._clear()
            self._graphs.make(key)

    def first(self, report: ProgressReport, *, everything: bool) -> None:
        """Captures the graphs that no request should have to wait for; all of them where requests leave no idle time."""
        first = self._graphs.first(everything=everything)
        self._clear()
        try:
            with torch.inference_mode():
                for done, key in enumerate(first, 1):
                    self._graphs.make(key)
                    report("CUDA graphs", done, len(first), "")
        except torch.OutOfMemoryError as error:
            self._graphs.abandon(error)
