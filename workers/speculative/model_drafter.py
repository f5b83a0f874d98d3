"""A model of its own that drafts: it says what may come, and the row's own sampler draws from that with the row's own random numbers.

So a draft is accepted at least with (1 - TV) / (1 + TV), where TV is the total variation between what both models say (common random
numbers, arXiv 2408.07978). Its layers have caches in the pages of the model's own (protocol/kv.py); what it has computed of a row is
followed here, and what it lacks it computes when it drafts again. A block that came from the prefix cache may lack some of it: then
drafts are worse, and the text is the same. For a device whose tokens the host reads at once: a CPU.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.edges.step import NewRow
from meshlm.workers.batch import StepInputs
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.sampler import SampleRows, sample
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import StepColumns, columns_of
from meshlm.workers.speculative.drafter import Drafts, no_drafts

if TYPE_CHECKING:
    from meshlm.workers.engine.compute import Compute
    from meshlm.workers.engine.kit import TorchInputs

CHUNK = 256  # tokens of a row in one pass


class ModelDrafter:
    """See `Drafter`."""

    def __init__(
        self, model: Decoder, vocab_size: int, rows: DeviceRows, inputs: "TorchInputs", compute: "Compute"
    ) -> None:
        """vocab_size: of the model that it drafts for, whose tokens are its own as far as it has any."""
        self._model, self._vocab_size = model, vocab_size
        self._rows, self._inputs, self._compute = rows, inputs, compute
        self._tokens: I32 = rows.tokens.numpy()
        self._num_computed = np.zeros(
            rows.table.num_rows, np.int64
        )  # leading tokens of each row in the caches; -1: as the step says

    def reset(self) -> None:
        """It learns nothing."""

    def add_row(self, new: NewRow) -> None:
        self._num_computed[new.row] = -1

    def remove_row(self, row: int, num_known: int) -> None:
        """What it had of the row means nothing to the next."""

    def computed(self, step: StepColumns, counts: I32, hidden: Tensor) -> None:
        """Prompts are computed here likewise; what decodes add waits until they are drafted for."""
        rows, starts = step.rows, step.starts.astype(np.int64)
        fresh = self._num_computed[rows] < 0  # what is before its first step came from the prefix cache
        self._num_computed[rows[fresh]] = starts[fresh]
        prompts = step.counts > 1
        if step.drafts is not None:
            prompts[step.places] &= step.drafts.counts == 0
        if prompts.any():
            self._pass(rows[prompts], starts[prompts], step.counts[prompts])
            self._num_computed[rows[prompts]] = (starts + step.counts)[prompts]

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        drafts = no_drafts(most)
        starts = np.minimum(self._num_computed[rows], lens - 1)
        while (late := np.flatnonzero(lens - starts > CHUNK)).size:  # nothing was drafted for it for long
            self._pass(rows[late], starts[late], np.full(len(late), CHUNK, np.int32))
            starts[late] += CHUNK
        counts = (lens - starts).astype(np.int32)
        for nth in range(drafts.tokens.shape[1]):
            here = np.flatnonzero(most > nth)
            ends = lens[here] + nth
            states = self._pass(rows[here], starts[here], counts[here])
            drafts.tokens[here, nth] = found = self._draw(states, rows[here], ends)
            self._tokens[rows[here], ends] = found
            starts, counts = lens + nth, np.ones(len(rows), np.int32)
        drafts.counts[:] = most
        self._num_computed[rows] = lens + most - 1
        return drafts

    def _pass(self, rows: I32, starts: I64, counts: I32) -> Tensor:
        """Computes these tokens; the states [rows, hidden] of the last ones."""
        batch: StepInputs = self._inputs.of_step(columns_of(rows, starts.astype(np.int32), counts))
        batch = replace(
            batch, input_ids=batch.input_ids.clamp(min=0), vectors=None
        )  # what came as a vector is no token here
        attention = self._compute.attention.step(batch, self._rows.block_size)
        hidden = self._model(batch, self._compute.caches[-len(self._model.local.layers) :], attention)
        assert batch.logits_indices is not None
        found: Tensor = hidden[batch.logits_indices]
        return found

    def _draw(self, states: Tensor, rows: I32, lens: I64) -> NDArray[np.int32]:
        """A token for each row, which has so many."""
        columns = self._rows.table.columns
        logits = self._model.logits(states)[:, : self._vocab_size]
        if (missing := self._vocab_size - logits.shape[1]) > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        prompt_lens = columns["num_prompt_tokens"][rows].astype(np.int64)
        at = SampleRows(rows, lens - prompt_lens, lens, prompt_lens)
        found: NDArray[np.int32] = sample(logits, at, columns, self._rows.tokens).int().clamp_(min=0).numpy()
        return found
