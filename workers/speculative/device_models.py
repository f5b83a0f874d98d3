"""Models that draft on a GPU: what layers say that read the model's states (mtp with one layer, eagle, eagle3), and what a smaller
model says. As states_drafter.py and model_drafter.py do on a CPU; here nobody waits, so positions are counted on the device.

Behind each step the drafting model computes the step's tokens, those that were refused as well: what it leaves of them in its caches
is written over by the next step, which begins at the row's last known token, before anybody sees it. Each row's last state is kept.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from meshlm.workers.batch import StepInputs
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.graphs.keys import decode_sizes
from meshlm.workers.graphs.replays import PATIENCE, Replays
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.rows.changes import I32, NOTHING
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import columns_of
from meshlm.workers.rows.table import aligned
from meshlm.workers.speculative.device_drafter import ComputedStep, DraftedRows, Kept

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
        graphs: Replays,
        most: int,
    ) -> None:
        """target_states: of the last step's first tokens, so many, what a model takes that reads them, [t, any]; None: it is a model of
        its own. most: drafts of a row."""
        self._model, self._target_states, self._compute = model, target_states, compute
        self._rows, self._inputs, self._head, self._graphs = rows, inputs, head, graphs
        num_rows, device = rows.table.num_rows, rows.state.device
        self._states = torch.zeros(num_rows, model.spec.hidden_size, dtype=head.hidden.dtype, device=device)
        self._stride, self._sizes, self._most = aligned(num_rows), decode_sizes(rows.max_rows), most
        # Rows, those with most drafts first, and for each draft prefix sums of who gets it.
        self._drafting = torch.zeros(1 + most, self._stride, dtype=torch.int32, device=device)
        self._vocab_size = head.vocab_size

    def computed(self, step: ComputedStep, kept: Kept) -> None:
        """Computes the same tokens; of states, together with the tokens that follow them."""
        self._graphs.run(step.key, lambda: self._compute_again(step.batch(), kept))

    def _compute_again(self, batch: StepInputs, kept: Kept) -> None:
        states = None if self._target_states is None else self._target_states(len(batch.input_ids))
        found = self._run(batch, states)
        if states is not None:
            last = (kept.firsts + kept.counts - 1).clamp_(0, len(found) - 1).long()
            self._states.index_copy_(0, kept.rows.long(), found[last])

    def _run(self, batch: StepInputs, states: Tensor | None) -> Tensor:
        ids = batch.input_ids if states is None else self._inputs.following(batch)
        batch = replace(batch, input_ids=ids.clamp(min=0), vectors=None, adapters=None)
        attention = self._compute.attention.step(batch, self._rows.block_size)
        caches = self._compute.caches[-len(self._model.local.layers) :]
        found: Tensor = self._model(batch, caches, attention, states)
        return found

    def draft(self, of: DraftedRows, found: Tensor) -> None:
        counts = of.host.drafts
        order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        torch.clamp(of.drafts[: of.m], min=0, out=found[: of.m])
        if len(order):
            self._draft(of.host.rows[order], counts[order])

    def _draft(self, rows: I32, counts: I32) -> None:
        """Drafts for these rows, of which each gets so many, a falling number."""
        n, most = len(rows), int(counts[0])
        size = next(size for size in self._sizes if size >= n)
        host = np.full((1 + most, self._stride), self._rows.max_rows, np.int32)
        host[0, :n] = rows
        host[1:] = np.minimum(np.arange(1, self._stride + 1), (counts > np.arange(most)[:, None]).sum(1)[:, None])
        self._inputs.staging.send(host.ravel(), self._drafting.view(-1))
        self._graphs.run((size, most), lambda: self._pass(size, most))

    def _pass(self, size: int, most: int) -> None:
        """`_drafting` says for which rows, of so many with padding."""
        rows, *ends = self._drafting[: 1 + most, :size]
        known = self._rows.columns["num_known"][rows.long()]
        states = self._states[rows.long()]
        for nth, upto in enumerate(ends):
            at = (known + (nth - 1)).clamp_(min=0)
            if self._target_states is None:
                states = self._run(self._inputs.decodes(rows, at, upto), None)
            elif nth:
                states = self._run(self._inputs.decodes(rows, (at - 1).clamp_(min=0), upto), states)
            self._head.draw(states, (rows, at, upto), self._logits)

    def _logits(self, hidden: Tensor, out: Tensor) -> None:
        """Of the target's tokens; -inf for those that it has none for."""
        if self._model.spec.vocab_size == self._vocab_size:
            self._model.logits(hidden, out=out)
            return
        found = self._model.logits(hidden)[:, : self._vocab_size]
        out[:, found.shape[1] :] = -torch.inf
        out[:, : found.shape[1]].copy_(found)

    def forget_graphs(self) -> None:
        self._graphs.forget()

    def warm_up(self, full: list[int]) -> None:
        """Compiles what drafts need, on the dummy row, whose pages hold nothing yet. full: lengths of the prompts of a largest step."""
        dummy, none = self._rows.max_rows, torch.zeros(1, dtype=torch.int32, device=self._drafting.device)
        self._rows.columns["num_known"][dummy] = ALIVE
        for counts in ([1], [1] * min(8, dummy), [3], full[:dummy]):
            n = len(counts)
            step = columns_of(np.full(n, dummy, np.int32), np.zeros(n, np.int32), np.array(counts, np.int32))
            self._inputs.send(step, n, NOTHING, 0, np.arange(n))
            self._compute_again(self._inputs.of_step(step), Kept(none + dummy, none, none + 1))
        self._inputs.clear()
        for size in self._sizes:
            if size & (size - 1) == 0:
                for _ in range(PATIENCE):
                    self._draft(np.full(size, dummy, np.int32), np.full(size, self._most, np.int32))
        self._rows.columns["num_known"][dummy] = 0
