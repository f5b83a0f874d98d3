"""Rows whose prompt has audio, which the model's encoder gets before the first of its tokens is computed.

The audio stays on the host until then. The encoder runs beside the step, before a CUDA graph is replayed: it writes into pages that
the request owns from this step on.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshlm.protocol.audio import Audio
from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.extras import find_extra
from meshlm.workers.rows.extras.extra import RowExtra, StepExtra
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.rows.table import RowTable

SILENCE = Audio(bytes(4))
Encode = Callable[[Tensor, Sequence[int]], None]
"""Encodes samples float32 [n] into a request's pages, the first of each group."""


class AudioStep(StepExtra[Tensor]):
    """The audio of the rows that begin in a step, one after the other."""

    def __init__(self, audio: list[tuple[Audio, Sequence[int]]], encode: Encode, device: torch.device) -> None:
        self._audio, self._encode, self._device = audio, encode, device

    def before_model(self) -> None:
        for audio, pages in self._audio:
            samples = torch.frombuffer(bytearray(audio.samples), dtype=torch.float32)
            if self._device.type == "cuda":  # the host does not wait for the copy
                samples = samples.pin_memory().to(self._device, non_blocking=True)
            self._encode(samples, pages)


class AudioRows(RowExtra[Tensor]):
    """See `RowExtra`."""

    extra = Audio

    def __init__(self, table: RowTable, encode: Encode, device: torch.device) -> None:
        self._table, self._encode, self._device = table, encode, device
        self._new: dict[int, tuple[Audio, Sequence[int]]] = {}

    def add_row(self, new: NewRow) -> None:
        audio = find_extra(new.extras, Audio)
        assert audio is not None
        self._new[new.row] = audio, self._table.pages(new.block_ids)[0].tolist()

    def remove_row(self, row: int) -> None:
        self._new.pop(row, None)

    def for_step(self, step: StepColumns) -> StepExtra[Tensor] | None:
        found = [self._new.pop(row) for row in step.rows.tolist() if row in self._new]
        return AudioStep(found, self._encode, self._device) if found else None

    def for_largest_step(self) -> StepExtra[Tensor]:
        return AudioStep([(SILENCE, [0] * self._table.num_groups)], self._encode, self._device)
