"""Steps that verify drafts on a GPU, which nobody waits for: rows are as long as the device alone knows.

Each token of a decode, the last known one and its drafts, stands in the step as a request of its own: positions, attention, penalties
and draws are those of a plain step. kernels/verify says on the device where they begin, and afterwards how many tokens a row keeps; the
host learns it with the tokens. A row for which the host must know each token before the next step (a grammar, what no kernel samples)
drafts nothing, so that its length is known. Used by the thread that steps.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.verify import kernel
from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar
from meshlm.workers.batch import StepInputs
from meshlm.workers.engine.pending import Outcome, Timeline
from meshlm.workers.graphs.keys import Key
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import StepColumns, Verified, columns_of
from meshlm.workers.rows.table import aligned
from meshlm.workers.speculative.device_drafter import ComputedStep, DeviceDrafter, DraftedRows, Kept
from meshlm.workers.speculative.verification import SYNTHETIC_SALT
from meshlm.workers.speculative.verifier import Verifier

if TYPE_CHECKING:
    from meshlm.workers.engine.triton_inputs import TritonInputs

MAX_LINES = 1024  # of rows with drafts in a step
NUM_COLUMNS = 6


def device_lines(max_rows: int, num_drafts: int) -> int:
    """Lines of rows with drafts that a step has at most, with so many rows and drafts of each; 0 without drafts."""
    return min(max_rows * (1 + num_drafts), MAX_LINES) if num_drafts else 0


class DeviceVerification(Verifier):
    """All rows have it: it follows how long those are whose tokens the host knows."""

    def __init__(
        self, config: SpeculativeConfig, drafter: DeviceDrafter, rows: DeviceRows, inputs: "TritonInputs"
    ) -> None:
        self.drafter, self._rows, self._inputs = drafter, rows, inputs
        num_rows, device = rows.table.num_rows, rows.state.device
        self._is_told = np.zeros(num_rows, np.bool_)  # its matcher needs each token
        self._num_known = np.zeros(num_rows, np.int64)  # of rows whose tokens the host is told
        self._stride = aligned(num_rows)
        # On the device: columns of `Verified`, the tokens of the step's entries, what is kept and what was drafted.
        self._columns = torch.zeros(NUM_COLUMNS, self._stride, dtype=torch.int32, device=device)
        self._entries = torch.zeros(aligned(rows.max_lines + 1), dtype=torch.int32, device=device)
        self.counts = torch.zeros(2, self._stride, dtype=torch.int32, device=device)
        inputs.verified = Columns(*self._of_attention(), rows.max_rows, rows.block_tables[0])
        inputs.queries = 1 + config.num_speculative_tokens
        self._key: Key | None = None  # of the last step's graph
        self._chance: tuple[Tensor, Tensor] | None = None
        if config.rejection_sample_method == "synthetic":
            rates = np.array((1.0, *config.synthetic_acceptance_rates))
            padded = np.zeros(kernel.MOST)
            padded[: len(rates) - 1] = rates[1:] / np.maximum(rates[:-1], 1e-300)
            salt = np.array([SYNTHETIC_SALT]).view(np.int32)
            self._chance = torch.from_numpy(padded).to(device), torch.from_numpy(salt).to(device)

    def _of_attention(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, ends, starts, *_ = self._columns
        return rows, starts, ends

    def add_row(self, new: NewRow) -> None:
        self._num_known[new.row] = len(new.token_ids) // 4
        self._is_told[new.row] = find_extra(new.extras, Grammar) is not None

    def reset(self) -> None:
        """It learns nothing."""

    def forget_graphs(self) -> None:
        self.drafter.forget_graphs()

    def draft(self, step: StepColumns, plan: StepPlan, changes: I32, segments: int) -> tuple[StepColumns, I32, int]:
        """The step as the device computes it. Its changes are applied with its columns."""
        of_rows, decodes = self._rows.table.columns, step.num_decodes
        samples = np.ones(step.n, np.bool_) if step.samples is None else step.samples
        told = (self._is_told[step.rows] | (of_rows["by_torch_until"][step.rows] > 0)) & samples
        drafts = np.zeros(step.n, np.int32)
        if plan.num_drafts:
            drafts[:decodes] = np.where(
                samples & ~told, np.frombuffer(plan.num_drafts, np.int32), 0
            )[:decodes]  # fmt: skip
        starts = step.starts.copy()
        starts[told] = (self._num_known[step.rows] - step.counts)[told]
        self._num_known[step.rows[told]] += 1
        origins, entries = np.arange(step.n), step
        each = 1 + drafts[:decodes]
        if drafts.any():
            origins = np.concatenate((np.repeat(origins[:decodes], each), origins[decodes:]))
            within = np.arange(int(each.sum())) - np.repeat(each.cumsum() - each, each)
            of_entries = starts[origins]
            of_entries[: len(within)] += within.astype(np.int32)
            entries = columns_of(step.rows[origins], of_entries, step.counts[origins])
            entries.places = np.flatnonzero(samples[origins])
            entries.samples = None if samples.all() else samples[origins]
            entries.adapted = step.adapted
        else:
            entries.starts = starts
        entries.verified = self._verified(
            step, drafts, starts, samples & ~told, samples, origins, may_draft=bool(plan.num_drafts)
        )
        return entries, changes, segments

    def _verified(
        self,
        step: StepColumns,
        drafts: I32,
        starts: I32,
        moves: NDArray[np.bool_],
        samples: NDArray[np.bool_],
        origins: I64,
        *,
        may_draft: bool,
    ) -> Verified:
        """moves: whose place the device knows."""
        decodes = step.num_decodes
        named = np.concatenate((np.arange(decodes), decodes + np.flatnonzero(samples[decodes:])))
        lines = np.where(samples, 1 + drafts, 0)[named]
        of_decodes = np.where(named < decodes, 1 + drafts[named], 0)
        lengths = step.counts + drafts
        ends, at = lengths.cumsum(), samples[named]
        return Verified(
            rows=step.rows[named],
            ends=of_decodes.cumsum().astype(np.int32),
            starts=np.where(moves[named], -1, starts[named]).astype(np.int32),
            firsts=(lines.cumsum() - lines).astype(np.int32),
            drafts=np.where(at, drafts[named], -1).astype(np.int32),
            tokens=np.where(np.arange(step.n) < decodes, ends - lengths, ends - 1)[named].astype(np.int32),
            origins=origins,
            places=named[at],
            lines=lines[at].astype(np.int32),
            may_draft=may_draft,
        )

    def warm_up(self) -> None:
        """Compiles all kernels; of a request without tokens, which gets none."""
        self._columns.zero_()
        self._columns[0], self._columns[4] = self._rows.max_rows, -1
        rows, ends, starts, firsts, drafts, _ = self._columns
        of, none = self._rows.columns, np.zeros(1, np.int32)
        nobody = Verified(none, none, none, none, none, none, np.arange(1), np.arange(1), none, may_draft=True)
        self.drafter.draft(DraftedRows(rows, drafts, 1, nobody), self.counts[1])
        known, tokens, draws = of["num_known"], self._rows.tokens, (of["seed"], of["num_prompt_tokens"])
        kernel.place(rows, ends, known, tokens, starts, self._inputs.columns(1)[1], self._entries, 1)
        columns, counts = (rows, ends, firsts, drafts), self.counts[0]
        kernel.accept(columns, known, starts, self._entries, counts, counts, tokens, draws, 1, self._chance)

    def place(self, step: StepColumns, key: Key | None) -> None:
        """The step's columns are on the device, padded as its graph is: drafts, and says where tokens stand."""
        self._key = key
        verified = step.verified
        assert verified is not None
        m = len(verified.rows)
        host = np.zeros((NUM_COLUMNS, self._stride), np.int32)
        host[0], host[1] = self._rows.max_rows, verified.ends[-1] if m else 0
        for line, column in zip(host, verified[:NUM_COLUMNS], strict=True):
            line[:m] = column
        self._inputs.staging.send(host.ravel(), self._columns.view(-1))
        if not m:
            return
        rows, ends, starts, _, drafts, _ = self._columns
        known, tokens = self._rows.columns["num_known"], self._rows.tokens
        if step.shows_drafts:
            self.drafter.draft(DraftedRows(rows, drafts, m, verified), self.counts[1])
        of_step = self._inputs.columns(step.n if key is None else key.requests)[1]
        kernel.place(rows, ends, known, tokens, starts, of_step, self._entries, m)

    def accept(self, step: StepColumns, sampled: Tensor, hidden: Tensor | None, timeline: Timeline) -> Outcome:
        """How many tokens each request keeps: then rows are so much longer. sampled int32 [l]: of the step's lines."""
        verified = step.verified
        assert verified is not None
        m = len(verified.rows)
        rows, ends, starts, firsts, drafts, tokens = self._columns
        of, known = self._rows.columns, self._rows.columns["num_known"]
        draws = of["seed"], of["num_prompt_tokens"]
        if m:
            kernel.accept(
                (rows, ends, firsts, drafts), known, starts, self._entries, sampled, self.counts[0], self._rows.tokens, draws, m,
                self._chance,
            )  # fmt: skip
        outcome = Outcome(timeline.fetch(sampled))
        if verified.may_draft and not step.shows_drafts:
            ones = np.ones(len(verified.places), np.int32)
            outcome = Outcome(outcome.tokens, ones, np.zeros_like(ones))
        elif step.shows_drafts:
            kept = timeline.fetch(self.counts[:, :m], more=True)
            outcome = outcome._replace(kept=kept, verified=verified)
        if step.n:
            self.drafter.computed(
                ComputedStep(self._key, partial(self._batch, step)), Kept(rows, tokens, self.counts[0])
            )
        return outcome

    def _batch(self, step: StepColumns) -> StepInputs:
        """The last step's tokens, with padding where a graph computed them."""
        if (key := self._key) is None:
            return self._inputs.of_step(step)
        return self._inputs.padded(key.requests, key.tokens, verified=key.drafts)
