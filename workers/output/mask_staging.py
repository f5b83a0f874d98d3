"""Masks of grammars on their way to the GPU, beside what it computes: CUDA graphs keep the addresses that they have there.

Owned by the head; used by the stepper thread.
"""

from typing import Any

import numpy as np
import torch

from meshlm.kernels.token_mask.kernel import workspace
from meshlm.workers.output.grammars import TokenMask
from meshlm.workers.rows.changes import I32

DEPTH = 2  # a step's masks are made when the step before has read its own


class MaskStaging:
    """`lines` [rows] says which of `words` [rows, vocab / 32] is a line's mask, -1 for none (kernels/token_mask)."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.lines, self.words = workspace(rows, vocab, device)
        self._device, self._slot = device, 0
        self._pinned: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: list[Any] = []
        self._cuda_stream: Any = None

    def take(self, count: int) -> I32:
        """Where the next masks are written, of so many lines."""
        if not self._pinned:
            self._allocate()
        self._slot = (self._slot + 1) % DEPTH
        if self._events:
            self._events[self._slot].synchronize()  # long past
        found: I32 = self._pinned[self._slot][1][:count].numpy()
        return found

    def send(self, mask: TokenMask) -> None:
        """What is launched from now on finds these masks, which are written where `take` said. Steps before must have read theirs."""
        lines, words = self._pinned[self._slot]
        slot, count = self._slot, len(mask.lines)
        which = lines.numpy()
        which.fill(-1)
        which[mask.lines] = np.arange(count)
        if self._device.type != "cuda":
            self.lines.copy_(lines)
            self.words[:count].copy_(words[:count])
            return
        with torch.cuda.stream(self._cuda_stream):
            self.lines.copy_(lines, non_blocking=True)
            self.words[:count].copy_(words[:count], non_blocking=True)
            self._events[slot].record()
        torch.cuda.current_stream().wait_event(self._events[slot])

    def _allocate(self) -> None:
        """With the first masks: most servers see none."""
        cuda = self._device.type == "cuda"
        for _ in range(DEPTH):
            like = (self.lines, self.words)
            lines, words = (torch.empty(each.shape, dtype=each.dtype, pin_memory=cuda) for each in like)
            self._pinned.append((lines, words))
            if cuda:
                make: Any = torch.cuda.Event  # typed in some versions of torch only
                self._events.append(make())
        if cuda:
            make = torch.cuda.Stream
            self._cuda_stream = make()
