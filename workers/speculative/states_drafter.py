"""A drafter that reads the states of the model that it drafts for (workers/models/drafters.py): mtp, eagle3.

Behind each step it computes the same tokens, those that were accepted, with their states; so its caches follow the model's, and of each
row it has the state of the last position but one. From that it drafts: the next token, and further ones from its own states. What it
keeps of drafts is overwritten when they are accepted. A block that came from the prefix cache has what it kept of another request, of
whose last position another token may have followed: then drafts are worse, and the text is the same.
"""

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.edges.step import NewRow
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative.draft_passes import DraftPasses
from meshlm.workers.speculative.drafter import Drafts, no_drafts


class StatesDrafter:
    def __init__(self, passes: DraftPasses, target: Decoder, taps: tuple[int, ...]) -> None:
        """taps: the target leaves the states that are wanted behind so many of its layers each (`Decoder.tap`); empty: they are its
        last ones."""
        self._passes, self._target, self._taps = passes, target, taps
        num_rows = passes.rows.table.num_rows
        self._states: Tensor = torch.empty(0)  # [rows, hidden]: the drafter's, of the last position but one
        self._lens = np.zeros(num_rows, np.int64)  # known tokens of each row, of which that is; 0: there is none

    def reset(self) -> None:
        self._lens[:] = 0

    def add_row(self, new: NewRow) -> None:
        self._lens[new.row] = 0

    def remove_row(self, row: int, num_known: int) -> None:
        """What it had of the row means nothing to the next."""

    def computed(self, step: StepColumns, counts: I32, hidden: Tensor) -> None:
        """Computes the same tokens, but drafts that were refused."""
        kept = step.counts.copy()
        if step.drafts is not None:
            kept[step.places] += counts - 1 - step.drafts.counts
        within = np.arange(step.t) - np.repeat(np.cumsum(step.counts) - step.counts, step.counts)
        given = self._target.tapped[: step.t] if self._taps else hidden
        given = given[torch.from_numpy(within < np.repeat(kept, step.counts))]
        found = self._passes.run(step.rows, step.starts.astype(np.int64), kept, given)
        if not len(self._states):
            self._states = found.new_empty(len(self._lens), found.shape[1])
        self._states[torch.tensor(step.rows)] = found
        self._lens[step.rows] = step.starts + kept + 1

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        most = np.where(self._lens[rows] == lens, most, 0).astype(np.int32)
        drafts = no_drafts(most)
        if not drafts.tokens.shape[1]:
            return drafts
        states = self._states[torch.tensor(rows)]
        for nth in range(drafts.tokens.shape[1]):
            here = np.flatnonzero(most > nth)
            places = torch.from_numpy(here)
            if nth:
                ones = np.ones(len(here), np.int32)
                states[places] = self._passes.run(rows[here], lens[here] + nth - 2, ones, states[places])
            drafts.tokens[here, nth] = self._passes.draw(states[places], rows[here], lens[here] + nth)
        drafts.counts[:] = most
        return drafts
