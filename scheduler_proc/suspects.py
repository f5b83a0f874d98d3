"""Whose fault it was that a worker died or a step failed. Pure; owned by core.py.

All requests of a step that ends so are under suspicion, though one at most has done it. Most deaths are nobody's doing, so after the
first all go on together. Those under whom a worker died `max_crashes` times without that they got on between, and those of a step that
failed, are suspects: one of them at a time is computed, alone in its steps, until it gets on (trial.py). When it happens then, that
one has done it, and ends. Nobody is blamed for what happens in company.
"""

from collections.abc import Iterable

from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.request_table import RequestTable
from meshlm.scheduler_proc.states import RequestState


class Suspects:
    """`table` has the requests; they end there."""

    def __init__(self, table: RequestTable, max_crashes: int) -> None:
        self._table, self._max_crashes = table, max_crashes

    def worker_died(self, in_steps: Iterable[Request], output: Output) -> None:
        """A worker died with these in the steps in flight."""
        here = _living(in_steps)
        for request in here:
            request.crashed()
        if len(here) == 1 and here[0].is_suspect(self._max_crashes):
            deaths = here[0].num_crashes
            text = f"refused: its worker died {deaths} times while it computed this request, each time before the next token"
            self._table.finish(here[0], output, FinishReason.ERROR, text, ErrorKind.POISON)

    def step_failed(self, batch: Iterable[Request], message: str, output: Output, *, apart: bool = True) -> None:
        """A step of these failed, and its worker lives. apart: they may be computed again, one after the other."""
        here = _living(batch)
        guilty = [] if apart and len(here) > 1 else here
        for request in guilty:
            self._table.finish(request, output, FinishReason.ERROR, f"the model failed: {message}")
        for request in here if not guilty else ():
            request.suspect(self._max_crashes)


def _living(requests: Iterable[Request]) -> list[Request]:
    """Each of them once that has not ended."""
    return [request for request in dict.fromkeys(requests) if request.state is not RequestState.FINISHED]
