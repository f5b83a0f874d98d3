"""From the hidden states of a step's last tokens to the tokens that follow: what it is, and how plain torch does it on any device.

On a GPU with Triton kernels do it (logits_sampler.py). Owned by the engine; used by the stepper thread.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.workers.batch import StepInputs
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output import logprobs
from meshlm.workers.output.grammars import TokenMask
from meshlm.workers.output.logprobs import Details, Part
from meshlm.workers.output.sampler import apply_mask, sample, sample_rows
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.device_rows import DeviceRows, breakers_buffer, put
from meshlm.workers.rows.step_columns import StepColumns


class TorchHead:
    """A device's way to choose tokens; nothing in it waits for the device. All rows at once, by the general sampler.

    sampled: int32 [l] or longer, the tokens (or outcomes: kernels/sample/outcomes.py) of the last step's sampling requests, in order.
    """

    def __init__(self, model: Decoder, rows: DeviceRows, dtype: torch.dtype) -> None:
        self._model, self._rows, self._dtype, self._device = model, rows, dtype, rows.state.device
        self.sampled = torch.empty(0, dtype=torch.int32, device=self._device)
        columns, vocab = rows.table.columns, model.spec.vocab_size
        columns.breakers = breakers_buffer(rows.table.num_rows, vocab, self._device)
        self._mask: TokenMask | None = None
        self._raw: Tensor | None = None  # logits before sampling changed them, of the rows that want log-probabilities

    def take_mask(self, count: int) -> I32:
        """Where the masks of so many lines are written, int32 [count, vocab / 32]."""
        return np.empty((count, -(-self._model.spec.vocab_size // 32)), np.int32)

    def mask(self, mask: TokenMask) -> None:
        """The next tokens are chosen among those that this allows, in the lines that have a grammar."""
        self._mask = mask

    def sample(self, hidden: Tensor, batch: StepInputs, step: StepColumns) -> None:
        """A token for each of hidden [l, hidden]; it is written behind its row, too."""
        columns = self._rows.table.columns
        at = sample_rows(step, columns)
        logits = self._model.logits(hidden)
        wanted = np.flatnonzero(columns["logprobs"][at.rows] >= 0)
        self._raw = logits[put(wanted, self._device)].clone() if len(wanted) else None
        if self._mask is not None:
            apply_mask(logits, self._mask)
            self._mask = None
        self.sampled = sample(logits, at, columns, self._rows.tokens).int()
        where = put(np.stack((at.rows.astype(np.int64), at.lens)), self._device)
        self._rows.tokens[where[0], where[1]] = self.sampled.clamp(min=0)

    def finish(self, step: StepColumns, places: NDArray[np.int64]) -> list[Details]:
        """After the step, or its graph: log-probabilities that are asked for. places: of the step's sampling requests.

        Row by row, as if each were alone: equal logits are then in the same order whatever others ask for.
        """
        if self._raw is None:
            return []
        raw, self._raw = self._raw, None
        rows = step.rows[places]
        widths = self._rows.table.columns["logprobs"][rows]
        found = []
        for nth, line in enumerate(np.flatnonzero(widths >= 0).tolist()):
            width, token = int(widths[line]), self.sampled[line : line + 1].long().clamp_(min=0)
            packed = logprobs.packed(raw[nth : nth + 1], token, width, self._chosen(int(rows[line])))
            found.append(Details(packed, [Part(int(places[line]), 0, 1, width)]))
        return found

    def _chosen(self, row: int) -> Tensor | None:
        """The tokens whose log-probabilities a row wants, int64 [1, width]; None: the likeliest."""
        ids = self._rows.table.columns.params[row].logprob_token_ids
        return put(np.array([ids], np.int64), self._device) if ids else None

    def warm_up(self) -> None:
        """Allocate what a step may need at most beside its own, so that memory is profiled with it."""
        hidden = torch.zeros(self._rows.max_rows, self._model.spec.hidden_size, dtype=self._dtype, device=self._device)
        self._model.logits(hidden).float().softmax(dim=-1).double().cumsum(dim=-1)
