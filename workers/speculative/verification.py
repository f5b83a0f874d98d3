"""Steps that verify drafts: what is drafted behind each row's known tokens, and how many of them a row keeps.

Draws are functions of (seed, output index), and every drafted position is sampled with its own: a drafted token is kept while it equals
what is sampled before it, so a row's text is the same with and without drafts. A row's true length is known here alone (the plan says
the most that it can be). For a device whose tokens the host reads at once: a CPU. Used by the thread that steps.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar
from meshlm.workers.engine.pending import Outcome, Timeline
from meshlm.workers.graphs.keys import Key
from meshlm.workers.output.sampler import uniforms
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.changes import NOTHING as UNCHANGED
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import Drafts, StepColumns
from meshlm.workers.speculative.drafter import Drafter
from meshlm.workers.speculative.verifier import Verifier

if TYPE_CHECKING:
    from meshlm.workers.engine.kit import TorchInputs

NO_STATES = torch.empty(0)
NOTHING = Drafts(np.empty(0, np.int32), np.empty(0, np.int32))
SYNTHETIC_SALT = np.uint64(0x5350454344524654)  # so that acceptance by chance has nothing to do with the draws


class Verification(Verifier):
    """All rows have it: it follows how long they are.

    The stages of a pipeline each draft, and alike, for each computes the drafts. A row's next step is planned there when its last one
    is over, so the plan says how long the row is; of what it got, the drafts stand there on each stage, and the plan names the last
    token. How many were accepted no stage but the last knows in time, so drafters do not learn it.
    """

    def __init__(
        self, config: SpeculativeConfig, drafter: Drafter, rows: DeviceRows, inputs: "TorchInputs", *, staged: bool
    ) -> None:
        """staged: of a stage of a pipeline."""
        self._drafter, self._columns, self._inputs, self._staged = drafter, rows.table.columns, inputs, staged
        self._tokens: I32 = rows.tokens.numpy()
        self._num_known = np.zeros(rows.table.num_rows, np.int64)
        self._constrained = np.zeros(rows.table.num_rows, np.bool_)
        # By position: the likelihood that a draft is kept where those before it are; None: where it equals what is sampled.
        self._rates: NDArray[np.float64] | None = None
        if config.rejection_sample_method == "synthetic":
            rates = np.array((1.0, *config.synthetic_acceptance_rates))
            self._rates = rates[1:] / np.maximum(rates[:-1], 1e-300)

    def add_row(self, new: NewRow) -> None:
        self._num_known[new.row] = len(new.token_ids) // 4
        self._constrained[new.row] = find_extra(new.extras, Grammar) is not None
        self._drafter.add_row(new)

    def remove_row(self, row: int) -> None:
        self._drafter.remove_row(row, int(self._num_known[row]))

    def reset(self) -> None:
        self._drafter.reset()

    def draft(self, step: StepColumns, plan: StepPlan, changes: I32, segments: int) -> tuple[StepColumns, I32, int]:
        """Gives the step the places where its rows really are, and as many drafts as the plan allows and the drafter finds, once the
        plan's changes are in the rows: no changes are left. The drafts are written behind the rows' tokens."""
        self._inputs.apply(changes, segments)
        places, starts, counts = step.places, step.starts.copy(), step.counts.copy()
        rows = step.rows[places]
        if self._staged:
            self._num_known[rows] = starts[places] + counts[places]
        known = self._num_known[rows]
        starts[places] = known - counts[places]
        if plan.num_drafts:
            step.drafts = self._draft(rows, known, np.frombuffer(plan.num_drafts, np.int32)[places])
            counts[places] += step.drafts.counts
        step.starts, step.counts, step.t = starts, counts, int(counts.sum())
        if self._staged:
            drafted = 0 if step.drafts is None else step.drafts.counts
            self._drafter.computed(step, np.ones(len(places), np.int32) + drafted, NO_STATES)
        return step, UNCHANGED, 0

    def place(self, step: StepColumns, key: Key | None) -> None:
        """The host has said where tokens stand."""

    def _draft(self, rows: I32, known: I64, most: I32) -> Drafts:
        """The drafts of these rows, of which each may have so many."""
        drafting = np.flatnonzero(most)
        rows, known, counts = rows[drafting], known[drafting], np.zeros(len(most), np.int32)
        guessed = self._drafter.propose(rows, known, most[drafting])
        counts[drafting] = guessed.counts
        behind = np.arange(guessed.tokens.shape[1])
        drafted = behind < guessed.counts[:, None]
        tokens = guessed.tokens[drafted]
        self._tokens[np.repeat(rows, guessed.counts), (known[:, None] + behind)[drafted]] = tokens
        return Drafts(counts, tokens)

    def accept(self, step: StepColumns, sampled: Tensor, hidden: Tensor | None, timeline: Timeline) -> Outcome:
        """As `_accepted`, which the drafter then learns. hidden [t, hidden]: the last states of the step's tokens."""
        drafted = None if step.drafts is None else step.drafts.counts
        if hidden is None:  # no requests, or a stage that samples nothing
            return Outcome(timeline.fetch(sampled), drafted=drafted)
        tokens, counts = self._accepted(step, timeline.fetch(sampled))
        if not self._staged:
            self._num_known[step.rows[step.places]] += counts
            if self._inputs.draft_states is not None:
                self._inputs.draft_states.keep(step, counts)
            self._drafter.computed(step, counts, hidden)
        return Outcome(tokens, counts, drafted)

    def _accepted(self, step: StepColumns, sampled: I32) -> tuple[I32, I32]:
        """Of the sampled tokens [lines], a view of the head's, those that rows get, and how many each sampling request gets: the
        drafts up to the first that differs, and the token that is sampled there."""
        rows, drafts = step.rows[step.places], step.drafts or NOTHING
        if not len(drafts.tokens):
            return sampled, np.ones(len(rows), np.int32)
        each = 1 + drafts.counts
        begins = np.cumsum(each) - each
        nth = np.arange(len(sampled)) - np.repeat(begins, each)  # of the row's lines
        drafted = nth < np.repeat(drafts.counts, each)
        if self._rates is not None:
            self._by_chance(np.repeat(rows, each), step.lines().lens, nth, drafted, drafts.tokens, sampled)
        kept = np.zeros(len(sampled), np.bool_)
        kept[drafted] = sampled[drafted] == drafts.tokens
        counts = (np.minimum.reduceat(np.where(kept, len(sampled), nth), begins) + 1).astype(np.int32)
        given = nth < np.repeat(counts, each)
        if self._rates is not None:  # else they stand there
            self._tokens[np.repeat(rows, counts), step.lines().lens[given]] = np.maximum(sampled[given], 0)
        return sampled[given], counts

    def _by_chance(self, rows: I32, lens: I64, nth: I64, drafted: NDArray[np.bool_], tokens: I32, sampled: I32) -> None:
        """Puts drafts in the place of what was sampled as often as the rates say, and other tokens where they say no. Rows with a
        grammar keep to it, and to what was sampled."""
        assert self._rates is not None
        index = lens - self._columns["num_prompt_tokens"][rows]
        draws = uniforms(self._columns["seed"][rows] ^ SYNTHETIC_SALT, index)
        right = (draws[drafted] < self._rates[nth[drafted]]) & (sampled[drafted] >= 0)
        other = np.where(sampled[drafted] == tokens, np.where(tokens == 0, 1, tokens - 1), sampled[drafted])
        sampled[drafted] = np.where(self._constrained[rows[drafted]], sampled[drafted], np.where(right, tokens, other))
