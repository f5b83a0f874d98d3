"""Drafts that a row's last token comes again and again: `--speculative-config '{"method": "tiny_echo", "num_speculative_tokens": 2}'`."""

import numpy as np
from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.edges.step import NewRow
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative.drafter import Drafts
from torch import Tensor


class Echo:
    """See `Drafter`. It learns nothing."""

    def __init__(self, tokens: I32, config: SpeculativeConfig) -> None:
        self._tokens = tokens

    def reset(self) -> None: ...

    def add_row(self, new: NewRow) -> None: ...

    def remove_row(self, row: int, num_known: int) -> None: ...

    def computed(self, step: StepColumns, counts: I32, hidden: Tensor) -> None: ...

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        last = self._tokens[rows, lens - 1]
        return Drafts(np.repeat(last[:, None], int(most.max(initial=0)), axis=1), most)
