"""Models that draft on a GPU: what layers say that read the model's states (mtp with one layer, eagle, eagle3), and what a smaller
model says. As states_drafter.py and model_drafter.py do on a CPU; here nobody waits, so positions are counted on the device.

Behind each step the drafting model computes the step's tokens, those that were refused as well: what it leaves of them in its caches
is written over by the next step, which begins at the row's last known token, before anybody sees it. Each row's last state is kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from meshlm.workers.batch import StepInputs
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import columns_of
from meshlm.workers.speculative.device_drafter import DraftedRows, Kept

if TYPE_CHECKING:
    from meshlm.workers.engine.compute import Compute

ALIVE = 2  # tokens of the dummy row, while kernels are compiled


class DeviceModels:
    """The caches of its layers are the last ones of `compute`."""

    def __init__(
        self,
        model: Decoder,
        target_states: Callable[[int], Tensor] | None,
        rows: DeviceRows,
        compute: "Compute",
        inputs: TritonInputs,
        head: LogitsSampler,
    ) -> None:
        """target_states: of the last step's first tokens, so many, what a model takes that reads them, [t, any]; None: it is a model of
        its own."""
        self._model, self._target_states, self._compute = model, target_states, compute
        self._rows, self._inputs, self._head = rows, inputs, head
        num_rows, device = rows.table.num_rows, rows.state.device
        self._states = torch.zeros(num_rows, model.spec.hidden_size, dtype=head.hidden.dtype, device=device)
        self._drafting = torch.zeros(num_rows, dtype=torch.int32, device=device)  # rows, those with most drafts first
        self._ends = torch.arange(1, num_rows + 1, dtype=torch.int32, device=device)
        self._vocab_size = head.vocab_size

    def computed(self, batch_of: Callable[[], StepInputs], kept: Kept) -> None:
        """Computes the same tokens; of states, together with the tokens that follow them."""
        batch = batch_of()
        states = None if self._target_states is None else self._target_states(len(batch.input_ids))
        found = self._run(batch, states)
        if states is not None and kept.m:
            last = (kept.firsts[: kept.m] + kept.counts[: kept.m] - 1).clamp_(min=0).long()
            self._states.index_copy_(0, kept.rows[: kept.m].long(), found[last])

    def _run(self, batch: StepInputs, states: Tensor | None) -> Tensor:
        ids = batch.input_ids if states is None else self._inputs.following(batch)
        batch = replace(batch, input_ids=ids.clamp(min=0), vectors=None)
        attention = self._compute.attention.step(batch, self._rows.block_size)
        caches = self._compute.caches[-len(self._model.local.layers) :]
        found: Tensor = self._model(batch, caches, attention, states)
        return found

    def draft(self, of: DraftedRows, found: Tensor) -> None:
        counts = of.host.drafts
        order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        torch.clamp(of.drafts[: of.m], min=0, out=found[: of.m])
        if not len(order):
            return
        self._inputs.staging.send(of.host.rows[order], self._drafting)
        self._draft(counts[order])

    def _draft(self, counts: I32) -> None:
        """Drafts for the first rows of `_drafting`, of which each gets so many, a falling number."""
        rows = self._drafting[: len(counts)]
        known = self._rows.columns["num_known"][rows.long()]
        states = None if self._target_states is None else self._states[rows.long()]
        for nth in range(int(counts[0])):
            n = int((counts > nth).sum())
            if states is None:
                states_then = self._run(self._inputs.decodes(rows[:n], known[:n] + (nth - 1)), None)
            elif nth:
                states_then = self._run(self._inputs.decodes(rows[:n], known[:n] + (nth - 2)), states[:n])
            else:
                states_then = states[:n]
            self._head.draw(states_then, (rows[:n], known[:n] + (nth - 1), self._ends[:n]), self._logits)
            states = None if self._target_states is None else states_then

    def _logits(self, hidden: Tensor, out: Tensor) -> None:
        """Of the target's tokens; -inf for those that it has none for."""
        if self._model.spec.vocab_size == self._vocab_size:
            self._model.logits(hidden, out=out)
            return
        found = self._model.logits(hidden)[:, : self._vocab_size]
        out[:, found.shape[1] :] = -torch.inf
        out[:, : found.shape[1]].copy_(found)

    def warm_up(self, largest: int) -> None:
        """Compiles what drafts need, on the dummy row, whose pages hold nothing yet. largest: tokens of a step."""
        dummy = self._rows.max_rows
        self._rows.columns["num_known"][dummy] = ALIVE
        for counts in ([1], [1] * min(8, dummy), [3], [largest]):
            n = len(counts)
            step = columns_of(np.full(n, dummy, np.int32), np.zeros(n, np.int32), np.array(counts, np.int32))
            self._inputs.send(step, n, np.empty(0, np.int32), 0, np.arange(n))
            batch_of = partial(self._inputs.of_step, step)
            none = torch.zeros(n, dtype=torch.int32, device=self._drafting.device)
            self.computed(batch_of, Kept(none + dummy, none, none + 1, n))
            self._drafting[:n] = dummy
            self._draft(np.full(n, ALIVE, np.int32))
        self._inputs.clear()
