"""Whose fault it was that a worker died or a step failed. Pure; owned by core.py.

All requests of a step that ends so are under suspicion, though one at most has done it. Most deaths are nobody's doing, so after the
first all go on together. Those under whom a worker died `max_crashes` times without a token between them, and those of a step that
failed, are suspects: of these one at a time is computed (trial.py) until it gets its next token, beside others that
run well, and nobody new begins meanwhile. When it happens again the one suspect in the step has done it, and ends; whoever shared
the step with it goes on.
"""

from collections.abc import Iterable

from meshlm.protocol.ids import ErrorKind, FinishReason
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.request import Request, RequestState
from meshlm.scheduler_proc.request_table import RequestTable


class Suspects:
    """`table` has the requests; they end there."""

    def __init__(self, table: RequestTable, max_crashes: int) -> None:
        self._table, self._max_crashes = table, max_crashes

    def worker_died(self, in_steps: Iterable[Request], output: Output) -> None:
        """A worker died with these in the steps in flight."""
        here = _living(in_steps)
        suspects = here if len(here) == 1 else self._suspects(here)
        for request in here:
            request.crashed()
        if len(suspects) == 1 and suspects[0].is_suspect(self._max_crashes):
            deaths = suspects[0].num_crashes
            text = f"refused: its worker died {deaths} times while it computed this request, each time before the next token"
            self._table.finish(suspects[0], output, FinishReason.ERROR, text, ErrorKind.POISON)

    def step_failed(self, batch: Iterable[Request], message: str, output: Output) -> None:
        """A step of these failed, and its worker lives."""
        here = _living(batch)
        suspects = here if len(here) == 1 else self._suspects(here)
        if len(suspects) == 1:
            self._table.finish(suspects[0], output, FinishReason.ERROR, f"the model failed: {message}")
            return
        for request in here:
            request.suspect(self._max_crashes)

    def _suspects(self, requests: list[Request]) -> list[Request]:
        return [request for request in requests if request.is_suspect(self._max_crashes)]


def _living(requests: Iterable[Request]) -> list[Request]:
    """Each of them once that has not ended."""
    return [request for request in dict.fromkeys(requests) if request.state is not RequestState.FINISHED]
