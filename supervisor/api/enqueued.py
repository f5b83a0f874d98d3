"""Requests of an LLM that run while its program does something else: `enqueue` and `wait_for_completion`. Owned by llm.py."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from tqdm import tqdm

from meshlm.protocol.edges.text import Submit
from meshlm.supervisor.api.background import Background, unless_ended
from meshlm.supervisor.api.outputs import RequestOutput
from meshlm.supervisor.api.sampling import SamplingParams
from meshlm.supervisor.errors import StartError


class _Batch(NamedTuple):
    """What one call has enqueued."""

    work: Future[list[RequestOutput]]
    each: Sequence[SamplingParams]


class Enqueued:
    """Those that nobody has waited for, in their order."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._batches: list[_Batch] = []

    def add(self, submits: Sequence[tuple[Submit, RequestOutput]], each: Sequence[SamplingParams]) -> list[str]:
        """Send them, and do not wait: the ids of the requests."""
        run = self._background.client.run(submits, None)
        work = self._background.start(unless_ended(self._background.supervisor, run))
        self._batches.append(_Batch(work, each))
        return [request.request_id for _, request in submits]

    def wait(self, use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """The results of all. Where a batch fails the others end all the same before its error is raised."""
        batches, self._batches = self._batches, []
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        total = sum(one.n for batch in batches for one in batch.each)
        found: list[RequestOutput] = []
        errors: list[Exception] = []
        try:
            with make_bar(total=total, desc="Generating", disable=not use_tqdm, dynamic_ncols=True) as bar:
                for batch in batches:
                    try:
                        found += finished(batch.work.result(), batch.each)
                    except (ValueError, StartError) as error:
                        errors.append(error)
                    bar.update(sum(one.n for one in batch.each))
        except BaseException:  # Ctrl-C: nobody waits for them any more
            for batch in batches:
                batch.work.cancel()
            raise
        if errors:
            raise errors[0]
        return found


def finished(found: list[RequestOutput], each: Sequence[SamplingParams]) -> list[RequestOutput]:
    """The same, without the text of those that asked for none."""
    for request, one in zip(found, each, strict=True):
        if not one.detokenize:
            for output in request.outputs:
                output.text = ""
    return found
