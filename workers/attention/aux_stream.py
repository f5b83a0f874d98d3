"""A second stream: two kernels that do not need each other run beside one another, where the GPU has room."""

from collections.abc import Callable
from typing import Any

import torch


class AuxStream:
    """Used by the one thread that launches; also while a graph is captured, of which the fork becomes a part."""

    def __init__(self, device: torch.device) -> None:
        """Makes a second stream; on the CPU (tests) there is none, and one callable runs after the other."""
        self._here = device.type == "cuda"
        if self._here:
            cuda: Any = torch.cuda  # typed in some versions of torch only
            self._cuda_stream = cuda.Stream(device)
            self._begun, self._ended = cuda.Event(), cuda.Event()

    def both(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Behind what the current stream has so far, `second` beside `first`; what follows on it waits for both. What they use
        stays allocated until this returns, so it needs no record of the second stream. `first` begins first: the GPU places all of
        its programs before any of the other's."""
        if not self._here:
            first()
            second()
            return
        current = torch.cuda.current_stream(self._cuda_stream.device)
        self._begun.record(current)
        first()
        self._cuda_stream.wait_event(self._begun)
        with torch.cuda.stream(self._cuda_stream):
            second()
            self._ended.record(self._cuda_stream)
        current.wait_event(self._ended)
