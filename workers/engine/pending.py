"""A step on its way: its tokens come to the host behind a mark in the device's queue, which the completer thread waits for.

The stepper thread marks and fetches, and waits for nothing.
"""

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.sample.outcomes import NONE_LEFT
from meshlm.protocol.edges.step import RowFailed, StepResult
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.workers.output.logprobs import Details, columns_by_place, first
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.extras.extra import StepExtra, with_findings
from meshlm.workers.rows.step_columns import COMPUTED, Mark, StepColumns, Verified

NO_TOKEN = RowFailed(
    "no token is left: what the request allows, bans and forbids to end (min_tokens) leaves none that may come"
)
NO_NUMBER = RowFailed("the model's logits are not numbers", ErrorKind.INTERNAL)


def of_tokens(tokens: NDArray[np.int32], places: NDArray[np.int64]) -> dict[int, RowFailed]:
    """By place in the batch, where `tokens` [l] has an outcome. places [l]: of the requests that sampled."""
    lines = np.flatnonzero(tokens < 0)
    return {int(places[line]): NO_TOKEN if tokens[line] == NONE_LEFT else NO_NUMBER for line in lines}


DEPTH = 8  # steps whose tokens may be on their way at the same time


class Timeline:
    """The marks by which a device's results come to the host. A CPU's: a step is computed when its launch returns."""

    def mark(self) -> Mark:
        return COMPUTED

    def fetch(self, values: Tensor, *, more: bool = False) -> I32:
        """int32 [any] on the host, there when a later mark has been reached. more: of the step that fetched the last ones."""
        found: I32 = values.numpy()
        return found

    def launched_ns(self, begun_ns: int) -> int:
        """The time at which a step counts as launched whose launch began then, in ns."""
        return begun_ns  # it computes as it launches


class GpuTimeline(Timeline):
    """Tokens are copied into pinned memory, in a ring."""

    def __init__(self, most: int) -> None:
        """most: ints of a step."""
        self._slots = [torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(DEPTH)]
        self._num_steps = self._begin = 0

    def mark(self) -> Mark:
        make: Any = torch.cuda.Event  # typed in some versions of torch only
        event: Mark = make(enable_timing=True)
        now: Any = event
        now.record()
        return event

    def fetch(self, values: Tensor, *, more: bool = False) -> I32:
        if not more:
            self._num_steps, self._begin = self._num_steps + 1, 0
        begin, self._begin = self._begin, self._begin + values.numel()
        slot = self._slots[self._num_steps % DEPTH][begin : self._begin].view(values.shape)
        slot.copy_(values, non_blocking=True)
        found: I32 = slot.numpy()
        return found

    def launched_ns(self, begun_ns: int) -> int:
        return time.monotonic_ns()


def timeline_of(device: torch.device, rows: DeviceRows) -> Timeline:
    """For a step's tokens, and the two numbers that drafts leave of each row."""
    return Timeline() if device.type == "cpu" else GpuTimeline(rows.max_lines + 2 * rows.max_rows)


class Told(NamedTuple):
    """What a step's requests got."""

    tokens: I32  # [sum(counts)]
    counts: I32 | None  # [samples] of each request that samples; None: one each
    drafted: I32 | None  # [samples] tokens that were drafted for it; None: none


class Outcome(NamedTuple):
    """The same on its way to the host, there when the step has ended."""

    tokens: I32  # [l] of all lines, or of those that stay
    counts: I32 | None = None
    drafted: I32 | None = None
    kept: I32 | None = None  # [2, m] of the requests of `verified`: tokens that stay, and drafts
    verified: Verified | None = None

    def told(self) -> Told:
        """Read it, after the step's end."""
        if self.kept is None or self.verified is None:
            return Told(self.tokens, self.counts, self.drafted)
        counts, drafted = self.kept[:, self.verified.drafts >= 0]
        each = self.verified.lines
        nth = np.arange(len(self.tokens)) - np.repeat(each.cumsum() - each, each)
        return Told(self.tokens[nth < np.repeat(counts, each)], counts, drafted)


class PendingStep:
    """Its tokens, log-probabilities and the findings of its extras are valid after the mark `end`. `before` is the end of the step
    before."""

    def __init__(
        self,
        result: StepResult,
        outcome: Outcome,
        step: StepColumns,
        details: list[Details],
        extras: list[StepExtra[Tensor]],
        marks: tuple[Mark, Mark, Mark],
    ) -> None:
        """details: of sampled tokens. marks: before, begin, end."""
        self._result, self._outcome, self._details, self._extras = result, outcome, details, extras
        self._verified = step.verified
        self._places = (
            step.places if step.verified is None else step.verified.places
        )  # of requests that sample, in the plan
        self._before, self._begin, self._end = marks

    def wait(self) -> StepResult:
        self._end.synchronize()
        tokens, counts, drafted = self._outcome.told()
        result = StepResult(
            session=self._result.session,
            step=self._result.step,
            token_ids=tokens.tobytes(),
            received_ns=self._result.received_ns,
            launched_ns=self._result.launched_ns,
            done_ns=time.monotonic_ns(),
            gpu_ns=int(self._begin.elapsed_time(self._end) * 1e6),
            gap_ns=int(self._before.elapsed_time(self._begin) * 1e6),
            counts=b"" if counts is None else counts.tobytes(),
            drafted=b"" if drafted is None else drafted.tobytes(),
        )
        if len(tokens) and tokens.min() < 0:
            places = self._places if counts is None else np.repeat(self._places, counts)
            result = replace(result, failed=of_tokens(tokens, places))
        if self._details:
            found = columns_by_place(self._details)
            if self._outcome.kept is not None and counts is not None:
                each = dict(zip(self._places.tolist(), counts.tolist(), strict=True))
                found = {place: first(columns, each[place]) for place, columns in found.items()}
            result = replace(result, logprobs=found)
        origins = None if self._verified is None else self._verified.origins
        return with_findings(result, self._extras, origins) if self._extras else result
