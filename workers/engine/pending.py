"""A step on its way: its tokens come to the host behind a mark in the device's queue, which the completer thread waits for.

The stepper thread marks and fetches, and waits for nothing.
"""

import time
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from meshlm.kernels.sample.outcomes import NONE_LEFT
from meshlm.protocol.edges.step import RowFailed, StepResult
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.workers.output.logprobs import Details, columns_by_place
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.extras.extra import StepExtra, with_findings
from meshlm.workers.rows.step_columns import COMPUTED, Mark

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

    def fetch(self, tokens: Tensor) -> I32:
        """int32 [l] on the host, there when a later mark has been reached."""
        found: I32 = tokens.numpy()
        return found

    def launched_ns(self, begun_ns: int) -> int:
        """The time at which a step counts as launched whose launch began then, in ns."""
        return begun_ns  # it computes as it launches


class GpuTimeline(Timeline):
    """Tokens are copied into pinned memory, in a ring."""

    def __init__(self, max_rows: int) -> None:
        self._slots = [torch.empty(max_rows, dtype=torch.int32, pin_memory=True) for _ in range(DEPTH)]
        self._num_steps = 0

    def mark(self) -> Mark:
        make: Any = torch.cuda.Event  # typed in some versions of torch only
        event: Mark = make(enable_timing=True)
        now: Any = event
        now.record()
        return event

    def fetch(self, tokens: Tensor) -> I32:
        slot = self._slots[self._num_steps % DEPTH][: len(tokens)]
        self._num_steps += 1
        slot.copy_(tokens, non_blocking=True)
        found: I32 = slot.numpy()
        return found

    def launched_ns(self, begun_ns: int) -> int:
        return time.monotonic_ns()


def timeline_of(device: torch.device, max_rows: int) -> Timeline:
    return Timeline() if device.type == "cpu" else GpuTimeline(max_rows)


class PendingStep:
    """Its tokens, log-probabilities and the findings of its extras are valid after the mark `end`. `before` is the end of the step
    before."""

    def __init__(
        self,
        result: StepResult,
        tokens: I32,
        counts: I32 | None,
        places: NDArray[np.int64],
        details: list[Details],
        extras: list[StepExtra[Tensor]],
        marks: tuple[Mark, Mark, Mark],
    ) -> None:
        """places: in the batch, of the requests that sample. counts: of the tokens of each; None: one. details: of sampled tokens.
        marks: before, begin, end."""
        self._result, self._tokens, self._counts = result, tokens, counts
        self._places = places if counts is None else np.repeat(places, counts)
        self._details, self._extras = details, extras
        self._before, self._begin, self._end = marks

    def wait(self) -> StepResult:
        self._end.synchronize()
        result = StepResult(
            session=self._result.session,
            step=self._result.step,
            token_ids=self._tokens.tobytes(),
            received_ns=self._result.received_ns,
            launched_ns=self._result.launched_ns,
            done_ns=time.monotonic_ns(),
            gpu_ns=int(self._begin.elapsed_time(self._end) * 1e6),
            gap_ns=int(self._before.elapsed_time(self._begin) * 1e6),
            counts=b"" if self._counts is None else self._counts.tobytes(),
            drafted=self._result.drafted,
        )
        if len(self._tokens) and self._tokens.min() < 0:
            result = replace(result, failed=of_tokens(self._tokens, self._places))
        if self._details:
            result = replace(result, logprobs=columns_by_place(self._details))
        return with_findings(result, self._extras) if self._extras else result
