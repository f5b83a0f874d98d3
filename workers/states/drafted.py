"""The states that a step leaves behind each token of its requests with drafts, until it is known how many of them these keep.

A state is overwritten as its sequence grows, so one that has seen a draft cannot go back to before it. Such a request leaves a state
behind each of its tokens instead, in pages behind those that the scheduler knows: in each group of layers with states one for each line
of a step (`StepInputs.draft_pages`). When its tokens are sampled, the state behind the last one that it keeps becomes that of the page
in its block table, and those at blocks' ends on the way become checkpoints where the table says so: no page that the scheduler
knows ever has the state of a draft that was refused. For a device whose tokens the host reads at once: a CPU. Owned by the engine.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.states.torch_states import segments

if TYPE_CHECKING:
    from meshlm.workers.engine.compute import Compute


class DraftStates:
    """The pages behind the first `num_pages`, for groups of layers with states."""

    def __init__(self, compute: "Compute", rows: DeviceRows, groups: list[int], num_pages: int, lines: int) -> None:
        """lines: of a step's requests with drafts, at most (memory.py: draft_lines)."""
        self._compute, self._rows = compute, rows
        self._begins = {group: num_pages + lines * nth for nth, group in enumerate(groups)}

    def pages(self, step: StepColumns) -> tuple[Tensor, ...]:
        if step.drafts is None or not len(step.drafts.tokens):
            return ()
        drafting = np.flatnonzero(step.drafts.counts)
        counts = step.drafts.counts[drafting, None] + 1
        begins, nth = np.cumsum(counts)[:, None] - counts, np.arange(counts.max())
        lines = np.full((step.n, len(nth)), -1)
        lines[step.places[drafting]] = np.where(nth < counts, begins + nth, -1)
        found, none = torch.from_numpy(lines), torch.empty(0, dtype=torch.int64)
        return tuple(
            torch.where(found < 0, -1, found + self._begins[group]) if group in self._begins else none
            for group in range(self._rows.num_groups)
        )

    def keep(self, step: StepColumns, counts: I32) -> None:
        """The step's requests that sample keep so many of its tokens: counts [samples]."""
        pages = self.pages(step)
        if not pages:
            return
        assert step.drafts is not None
        moves: dict[int, tuple[list[int], list[int]]] = {group: ([], []) for group in self._begins}
        for nth in np.flatnonzero(step.drafts.counts).tolist():
            place, count = step.places[nth], int(counts[nth])
            row, start = int(step.rows[place]), int(step.starts[place])
            for group, (sources, targets) in moves.items():
                table = self._rows.block_tables[group][row].tolist()
                for segment in segments(table, start, count, 0, self._rows.block_size):
                    sources.append(int(pages[group][place, segment.end - 1]))
                    targets.append(segment.write)
        for cache in self._compute.caches:
            if (state := cache.state) is not None:
                sources, targets = moves[state.group]
                for halves in (state.ssm, state.conv):
                    halves[:, targets] = halves[:, sources]
