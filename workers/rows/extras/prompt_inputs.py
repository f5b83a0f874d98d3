"""Rows whose prompt brings more than tokens: vectors in the place of some, or audio. Both stay on the host until their step.

A place that has a vector has the id `VECTOR` in the row's tokens. A buffer on the device is always there, and the first layer takes
from it what such an id stands for (workers/batch.py); so a step with vectors stays in its CUDA graph. Audio goes to the model's encoder
before the first of its tokens is computed, beside the step: the encoder writes into pages that the request owns from this step on.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from meshlm.protocol.audio import Audio
from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.extras import find_extra
from meshlm.protocol.prompt_embeds import EmbedsDType, PromptEmbeds
from meshlm.workers.batch import VECTOR
from meshlm.workers.rows.extras.extra import RowExtra, StepExtra
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.rows.table import RowTable

_DTYPES: dict[EmbedsDType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class VectorStep(StepExtra[Tensor]):
    """The vectors of a step's tokens, by the first of these that they belong to."""

    def __init__(self, vectors: dict[int, Tensor], buffer: Tensor) -> None:
        self._vectors, self._buffer = vectors, buffer

    def before_model(self) -> None:
        for begin, lines in self._vectors.items():
            if self._buffer.is_cuda:  # the host does not wait for the copy
                lines = lines.pin_memory().to(self._buffer.device, non_blocking=True)
            self._buffer[begin : begin + len(lines)] = lines


class PromptEmbedsRows(RowExtra[Tensor]):
    extra = PromptEmbeds

    def __init__(self, buffer: Tensor) -> None:
        """buffer [tokens, hidden]: of a step."""
        self._buffer = buffer
        self._rows: dict[int, tuple[PromptEmbeds, Tensor]] = {}  # with the vectors [n, hidden]

    def rewritten(self, new: NewRow) -> NewRow:
        token_ids = np.frombuffer(new.token_ids, np.int32).copy()
        for first, count in self._rows[new.row][0].spans:
            token_ids[first : first + count] = VECTOR
        return replace(new, token_ids=token_ids.tobytes())

    def add_row(self, new: NewRow) -> None:
        embeds = find_extra(new.extras, PromptEmbeds)
        assert embeds is not None
        flat = torch.frombuffer(bytearray(embeds.data), dtype=_DTYPES[embeds.dtype])
        self._rows[new.row] = embeds, flat.view(sum(count for _, count in embeds.spans), -1)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def for_step(self, step: StepColumns) -> StepExtra[Tensor] | None:
        """A row whose last vector is computed needs them no more."""
        found, begins = {}, np.cumsum(step.counts) - step.counts
        for place, row in enumerate(step.rows.tolist()):
            if row not in self._rows:
                continue
            embeds, vectors = self._rows[row]
            start, count = int(step.starts[place]), int(step.counts[place])
            for first, length, at in embeds.parts(start, start + count):
                found[int(begins[place]) + first - start] = vectors[at : at + length]
            last, num_last = embeds.spans[-1]
            if start + count >= last + num_last:
                del self._rows[row]
        return VectorStep(found, self._buffer) if found else None


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
