"""One step of the CUDA engine on the host: its columns before it is launched, its result afterwards."""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshlm.protocol.step_edge import StepPlan, StepResult
from meshlm.protocol.token_edge import LogprobColumns
from meshlm.workers.cuda.changes import I32
from meshlm.workers.cuda.logits_sampler import Details


class Columns32:
    """One step's requests, host side. n requests, t tokens."""

    __slots__ = ("all_sample", "counts", "n", "rows", "samples", "starts", "t")

    def __init__(self, plan: StepPlan) -> None:
        self.rows, self.starts = np.frombuffer(plan.rows, np.int32), np.frombuffer(plan.starts, np.int32)
        self.n, self.t = len(self.rows), plan.num_tokens
        self.counts = np.frombuffer(plan.counts, np.int32) if plan.counts else np.ones(self.n, np.int32)
        self.all_sample = not plan.samples
        self.samples = np.frombuffer(plan.samples, np.uint8).astype(np.bool_) if plan.samples else None

    @property
    def uniform(self) -> bool:
        """One token each, and each samples."""
        return self.n == self.t and (self.samples is None or bool(self.samples.all()))

    def places(self) -> NDArray[np.int64]:
        """Of the requests that sample."""
        return np.arange(self.n) if self.samples is None else np.flatnonzero(self.samples)


def columns_of(rows: I32, starts: I32, counts: I32) -> Columns32:
    plan = StepPlan(0, 0, rows.tobytes(), starts.tobytes(), counts.tobytes(), b"", int(counts.sum()))  # type: ignore[arg-type]
    return Columns32(plan)


class PendingStep:
    """A step on its way; its tokens and log-probabilities are valid after the event `end`. `before` is the end of the step before."""

    def __init__(
        self,
        result: StepResult,
        tokens: I32,
        details: tuple[list[Details], list[Details]],
        before: torch.cuda.Event,
        begin: torch.cuda.Event,
        end: torch.cuda.Event,
    ) -> None:
        """details: of sampled tokens, of prompts."""
        self._result, self._tokens, self._details = result, tokens, details
        self._before, self._begin, self._end = before, begin, end

    def wait(self) -> StepResult:
        self._end.synchronize()
        result = self._result
        return StepResult(
            session=result.session,
            step=result.step,
            token_ids=self._tokens.tobytes(),
            logprobs=_columns(self._details[0]),
            prompt_logprobs=_columns(self._details[1]),
            received_ns=result.received_ns,
            launched_ns=result.launched_ns,
            done_ns=time.monotonic_ns(),
            gpu_ns=int(self._begin.elapsed_time(self._end) * 1e6),
            gap_ns=int(self._before.elapsed_time(self._begin) * 1e6),
        )


def _columns(details: list[Details]) -> dict[int, LogprobColumns]:
    return {place: columns for one in details for place, columns in one.columns().items()}


def event_now() -> torch.cuda.Event:
    """Recorded now."""
    make: Any = torch.cuda.Event  # typed in some versions of torch only
    event: torch.cuda.Event = make(enable_timing=True)
    event.record()
    return event
