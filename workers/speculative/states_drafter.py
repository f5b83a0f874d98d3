"""A drafter that reads the states of the model that it drafts for (workers/models/drafters.py): mtp, eagle3.

Behind each step it computes the same tokens, those that were accepted, with their states; so its caches follow the model's, and of each
row it has the state of the last position but one. From that it drafts: the next token, and further ones from its own states. What it
keeps of drafts is overwritten when they are accepted. A block that came from the prefix cache has what it kept of another request, of
whose last position another token may have followed: then drafts are worse, and the text is the same.

Of several layers each drafts one token further. Layer k (from 0) takes the token 1 + k behind a position, so it is k positions behind
the first: those of which that token is known. Where it drafts it computes them, too, with drafts in the place of tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.edges.step import NewRow
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative.draft_passes import DraftPasses, lasts
from meshlm.workers.speculative.drafter import Drafts, no_drafts


class Computed(NamedTuple):
    """The states that a layer gave for positions of rows, row by row."""

    begins: I64  # [rows]
    counts: I64  # [rows]
    states: Tensor  # [sum(counts), hidden]


class StatesDrafter:
    def __init__(self, passes: DraftPasses, target: Decoder, taps: tuple[int, ...]) -> None:
        """taps: the target leaves the states that are wanted behind so many of its layers each (`Decoder.tap`); empty: they are its
        last ones."""
        self._passes, self._target, self._taps = passes, target, taps
        num_rows = passes.rows.table.num_rows
        self._states: Tensor = torch.empty(
            0
        )  # [layers, rows, hidden]: of the last position that each layer has of a row
        self._lens = np.zeros(num_rows, np.int64)  # known tokens of each row, of which those are; 0: there is none
        self._firsts = np.zeros(num_rows, np.int64)  # the first position that was computed here

    def reset(self) -> None:
        self._lens[:] = 0

    def add_row(self, new: NewRow) -> None:
        self._lens[new.row] = 0

    def remove_row(self, row: int, num_known: int) -> None:
        """Nothing is to be forgotten: the next request counts anew."""

    def computed(self, step: StepColumns, counts: I32, hidden: Tensor) -> None:
        """Computes the same tokens, but drafts that were refused."""
        kept = step.counts.copy()
        if step.drafts is not None:
            kept[step.places] += counts - 1 - step.drafts.counts
        within = np.arange(step.t) - np.repeat(np.cumsum(step.counts) - step.counts, step.counts)
        given = self._target.tapped[: step.t] if self._taps else hidden
        given = given[torch.from_numpy(within < np.repeat(kept, step.counts))]
        rows, starts = step.rows, step.starts.astype(np.int64)
        fresh = self._lens[rows] != starts + 1
        self._firsts[rows[fresh]] = starts[fresh]
        found = Computed(starts, kept.astype(np.int64), self._passes.run(rows, starts, kept, given))
        if not len(self._states):
            self._states = found.states.new_empty(self._passes.num_layers, len(self._lens), found.states.shape[1])
        ends = starts + kept
        for nth in range(1, self._passes.num_layers):
            first = self._firsts[rows]
            further = self._further(nth, rows, found, np.maximum(first, starts - nth), np.maximum(first, ends - nth))
            self._keep(nth - 1, rows, found)
            found = further
        self._keep(self._passes.num_layers - 1, rows, found)
        self._lens[rows] = ends + 1

    def _keep(self, nth: int, rows: I32, found: Computed) -> None:
        self._states[nth, torch.tensor(rows[found.counts > 0])] = found.states[lasts(found.counts)]

    def _further(self, nth: int, rows: I32, before: Computed, begins: I64, ends: I64) -> Computed:
        """What layer `nth` gives for these positions. before: what the layer before it gave, of all but the first, which may be the
        last position that it had."""
        counts = ends - begins
        place = np.repeat(np.arange(len(rows)), counts)
        at = np.arange(len(place)) + (begins - np.cumsum(counts) + counts)[place]
        behind = at - before.begins[place]
        offsets = len(rows) + np.cumsum(before.counts) - before.counts
        source = np.where(behind < 0, place, offsets[place] + behind)
        given = torch.cat((self._states[nth - 1, torch.tensor(rows)], before.states))[torch.from_numpy(source)]
        some = counts > 0
        if some.any():
            given = self._passes.run(rows[some], begins[some], counts[some].astype(np.int32), given, nth)
        return Computed(begins, counts, given)

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        most = np.where(self._lens[rows] == lens, most, 0).astype(np.int32)
        drafts = no_drafts(most)
        if not drafts.tokens.shape[1]:
            return drafts
        layers, ends = self._passes.num_layers, lens - 1
        states = self._states[0, torch.tensor(rows)]
        found = Computed(ends, np.zeros(len(rows), np.int64), states[:0])
        for nth in range(drafts.tokens.shape[1]):
            here = np.flatnonzero(most > nth)
            places = torch.from_numpy(here)
            if 0 < nth < layers:
                begins = np.maximum(self._firsts[rows], ends - nth)
                found = self._further(nth, rows, found, begins, np.where(most > nth, ends, begins))
                states[places] = found.states[lasts(found.counts)]
            elif nth:
                ones, at = np.ones(len(here), np.int32), ends[here] + nth - layers
                states[places] = self._passes.run(rows[here], at, ones, states[places], layers - 1)
            drafts.tokens[here, nth] = self._passes.draw(states[places], rows[here], lens[here] + nth)
        drafts.counts[:] = most
        return drafts
