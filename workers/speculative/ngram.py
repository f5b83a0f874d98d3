"""Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"): what followed the last tokens of a row where they stood before in its text."""

import numpy as np

from meshlm.protocol.edges.step import NewRow
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.speculative.drafter import Drafts, no_drafts


class NgramDrafter:
    """See `Drafter`. The longest run of last tokens, of `longest` down to `shortest`, that stands earlier in the row; of several places
    the first."""

    def __init__(self, tokens: I32, shortest: int, longest: int) -> None:
        self._tokens, self._lengths = tokens, range(longest, shortest - 1, -1)

    def reset(self) -> None:
        """It learns nothing."""

    def add_row(self, new: NewRow) -> None:
        """Its tokens are all that is asked for."""

    def remove_row(self, row: int, num_known: int) -> None:
        """Likewise."""

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        drafts = no_drafts(most)
        for nth, (row, length, count) in enumerate(zip(rows.tolist(), lens.tolist(), most.tolist(), strict=True)):
            if (begin := self._behind_match(self._tokens[row, :length])) is not None:
                found = self._tokens[row, begin : min(begin + count, length)]
                drafts.tokens[nth, : len(found)] = found
                drafts.counts[nth] = len(found)
        return drafts

    def _behind_match(self, text: I32) -> int | None:
        """Where the text goes on behind the place that is like its end."""
        ends = np.flatnonzero(text[:-1] == text[-1]) if len(text) else np.empty(0, np.int64)  # of the last token
        best: int | None = None
        for length in range(1, self._lengths.start + 1):
            if not len(ends):
                break
            if length in self._lengths:
                best = int(ends[0]) + 1
            if length >= len(text):
                break
            ends = ends[ends >= length]
            ends = ends[text[ends - length] == text[-1 - length]]
        return best
