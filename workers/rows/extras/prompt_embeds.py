"""Rows whose prompt has vectors in the place of tokens: they go to a buffer on the device, beside the step's token ids.

A place that has a vector has the id `VECTOR` in the row's tokens. The buffer is always there, and the first layer takes from it what
such an id stands for (workers/batch.py); so a step with vectors stays in its CUDA graph. The vectors stay on the host until their
step: it brings those that it computes.
"""

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.extras import find_extra
from meshlm.protocol.prompt_embeds import EmbedsDType, PromptEmbeds
from meshlm.workers.batch import VECTOR
from meshlm.workers.rows.extras.extra import RowExtra, StepExtra
from meshlm.workers.rows.step_columns import StepColumns

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
    """See `RowExtra`."""

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
