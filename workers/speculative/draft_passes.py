"""Passes of a model that drafts, over tokens of rows, and what is drawn of its logits. For a device whose tokens the host reads at
once: a CPU. Used by the thread that steps.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.workers.batch import StepInputs
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.sampler import SampleRows, sample
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import columns_of

if TYPE_CHECKING:
    from meshlm.workers.engine.compute import Compute
    from meshlm.workers.engine.kit import TorchInputs


class DraftPasses:
    """The caches of its layers are the last ones of `compute`."""

    def __init__(
        self, model: Decoder, vocab_size: int, rows: DeviceRows, inputs: "TorchInputs", compute: "Compute"
    ) -> None:
        """vocab_size: of the model that it drafts for, whose tokens are its own as far as it has any."""
        self._model, self._vocab_size = model, vocab_size
        self.rows, self._inputs, self._compute = rows, inputs, compute
        self.tokens: I32 = rows.tokens.numpy()

    @property
    def num_layers(self) -> int:
        """Layers of the model; of one that reads states: how many tokens it drafts by a layer of their own."""
        return len(self._model.local.layers)

    def run(self, rows: I32, starts: I64, counts: I32, given: Tensor | None = None, nth: int = 0) -> Tensor:
        """Computes these tokens of rows; their states [tokens, hidden]. given [tokens, ...]: states that it takes beside the tokens
        that follow these; nth: of which of its layers, each of which sees one token further."""
        step = columns_of(rows, starts.astype(np.int32), counts)
        batch: StepInputs = self._inputs.of_step(step)
        ids = batch.input_ids
        if given is not None:
            of_token, at = step.of_tokens()
            ids = torch.from_numpy(self.tokens[of_token, at + 1 + nth]).long()
        # What came as a vector is no token here.
        batch = replace(batch, input_ids=ids.clamp(min=0), vectors=None)
        attention = self._compute.attention.step(batch, self.rows.block_size)
        caches = self._compute.caches[-self.num_layers :]
        found: Tensor = self._model(batch, caches, attention, given, *((nth,) if nth else ()))
        return found

    def draw(self, states: Tensor, rows: I32, lens: I64) -> NDArray[np.int32]:
        """A token for each row, which has so many, written behind them."""
        columns = self.rows.table.columns
        logits = self._model.logits(states)[:, : self._vocab_size]
        if (missing := self._vocab_size - logits.shape[1]) > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        prompt_lens = columns["num_prompt_tokens"][rows].astype(np.int64)
        at = SampleRows(rows, lens - prompt_lens, lens, prompt_lens)
        found: NDArray[np.int32] = sample(logits, at, columns, self.rows.tokens).int().clamp_(min=0).numpy()
        self.tokens[rows, lens] = found
        return found


def lasts(counts: I32 | I64) -> Tensor:
    """Of states that stand row by row, so many of each, the last one of each row that has any."""
    return torch.from_numpy(counts.cumsum()[counts > 0] - 1)
