"""A model of its own that drafts: it says what may come, and the row's own sampler draws from that with the row's own random numbers.

Common random numbers: both models invert their own distribution over token ids at one uniform number, and the draft is accepted where
both find the same token. docs/speculation.md has what that costs beside rejection sampling.

Its layers have caches in the pages of the model's own (protocol/kv.py); what it has computed of a row is followed here, and what it
lacks it computes when it drafts again. A block from the prefix cache may lack some of it: then drafts are worse; the text is the same.
"""

import numpy as np
from torch import Tensor

from meshlm.protocol.edges.step import NewRow
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative.draft_passes import DraftPasses, lasts
from meshlm.workers.speculative.drafter import Drafts, no_drafts

CHUNK = 256  # tokens of a row in one pass


class ModelDrafter:
    def __init__(self, passes: DraftPasses) -> None:
        self._passes = passes
        # Leading tokens of each row in the caches; -1: as the step says.
        self._num_computed = np.zeros(passes.rows.table.num_rows, np.int64)

    def reset(self) -> None:
        """It learns nothing."""

    def add_row(self, new: NewRow) -> None:
        self._num_computed[new.row] = -1

    def remove_row(self, row: int, num_known: int) -> None:
        """Nothing is to be forgotten: the next request counts anew."""

    def computed(self, step: StepColumns, counts: I32, hidden: Tensor) -> None:
        """Prompts are computed here likewise; what decodes add waits until they are drafted for."""
        rows, starts = step.rows, step.starts.astype(np.int64)
        fresh = self._num_computed[rows] < 0  # what is before its first step came from the prefix cache
        self._num_computed[rows[fresh]] = starts[fresh]
        prompts = step.counts > 1
        if step.drafts is not None:
            prompts[step.places] &= step.drafts.counts == 0
        if prompts.any():
            self._passes.run(rows[prompts], starts[prompts], step.counts[prompts])
            self._num_computed[rows[prompts]] = (starts + step.counts)[prompts]

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        drafts = no_drafts(most)
        starts = np.minimum(self._num_computed[rows], lens - 1)
        while (late := np.flatnonzero(lens - starts > CHUNK)).size:  # nothing was drafted for it for long
            self._passes.run(rows[late], starts[late], np.full(len(late), CHUNK, np.int32))
            starts[late] += CHUNK
        counts = (lens - starts).astype(np.int32)
        for nth in range(drafts.tokens.shape[1]):
            here = np.flatnonzero(most > nth)
            ends = lens[here] + nth
            states = self._passes.run(rows[here], starts[here], counts[here])[lasts(counts[here])]
            drafts.tokens[here, nth] = self._passes.draw(states, rows[here], ends)
            starts, counts = lens + nth, np.ones(len(rows), np.int32)
        drafts.counts[:] = most
        self._num_computed[rows] = lens + most - 1
        return drafts
