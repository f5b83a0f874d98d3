"""A drafter on a device whose guesses a test makes on the host."""

from collections.abc import Callable

import torch
from torch import Tensor

from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.speculative.device_drafter import ComputedStep, DraftedRows, Kept

Guess = Callable[[int, list[int], int], list[int]]
"""Of a row with these known tokens: so many guesses."""


class HostDrafter:
    def __init__(self, rows: DeviceRows, guess: Guess) -> None:
        self._rows, self._guess = rows, guess

    def computed(self, step: ComputedStep, kept: Kept) -> None: ...

    def forget_graphs(self) -> None: ...

    def warm_up(self, full: list[int]) -> None: ...

    def draft(self, of: DraftedRows, found: Tensor) -> None:
        known = self._rows.columns["num_known"].tolist()
        for nth, (row, count) in enumerate(zip(of.host.rows.tolist(), of.host.drafts.tolist(), strict=True)):
            found[nth] = max(0, count)
            if count > 0:
                length = known[row]
                guesses = self._guess(row, self._rows.tokens[row, :length].tolist(), count)
                self._rows.tokens[row, length : length + count] = torch.tensor(guesses, dtype=torch.int32)
