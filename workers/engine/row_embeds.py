"""The vectors that came with prompts in the place of tokens, by row, until they are computed. Owned by rows.py.

They stay on the host: a step brings the device those that it computes. Such a step is launched kernel by kernel, as graphs read ids.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.prompt_embeds import EmbedsDType, PromptEmbeds
from meshlm.workers.batch import GivenEmbeds
from meshlm.workers.rows.step_columns import StepColumns

_DTYPES: dict[EmbedsDType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class RowEmbeds:
    """See the module docstring. It is false while no row has any."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[PromptEmbeds, Tensor]] = {}  # with the vectors [n, hidden]

    def __bool__(self) -> bool:
        return bool(self._rows)

    def take(self, row: int, embeds: PromptEmbeds | None) -> None:
        """A request takes the row."""
        self._rows.pop(row, None)
        if embeds is not None:
            flat = torch.frombuffer(bytearray(embeds.data), dtype=_DTYPES[embeds.dtype])
            self._rows[row] = embeds, flat.view(sum(count for _, count in embeds.spans), -1)

    def leave(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def reset(self) -> None:
        self._rows.clear()

    def of_step(self, step: StepColumns) -> tuple[GivenEmbeds, ...]:
        """The vectors of the tokens that the step computes. A row whose last one it computes needs them no more."""
        if not self._rows:
            return ()
        found = []
        begins = np.cumsum(step.counts) - step.counts
        for place, row in enumerate(step.rows.tolist()):
            if row not in self._rows:
                continue
            embeds, vectors = self._rows[row]
            start, count = int(step.starts[place]), int(step.counts[place])
            for first, length, at in embeds.parts(start, start + count):
                found.append(GivenEmbeds(int(begins[place]) + first - start, vectors[at : at + length]))
            last, num_last = embeds.spans[-1]
            if start + count >= last + num_last:
                del self._rows[row]
        return tuple(found)
