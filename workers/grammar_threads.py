"""Compiles the grammars of requests that wait for a row, beside the steps: the stepper waits for nobody. Owned by io.py."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct

from meshlm.protocol.edges.step import ExtraReady, PrepareExtra, RowFailed
from meshlm.protocol.grammar import Grammar
from meshlm.workers.output.matchers_lost import MatchersLost

if TYPE_CHECKING:
    from meshlm.workers.output.grammars import Grammars

NUM_THREADS = 2
_log = structlog.get_logger()


class GrammarThreads:
    """`say` sends an answer to the scheduler, from any thread. Each question has one."""

    def __init__(self, say: Callable[[Struct], None]) -> None:
        self._say = say
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")

    def submit(self, grammars: "Grammars | None", ask: PrepareExtra) -> None:
        """Have it compiled; without `grammars` this worker makes no masks, and needs nothing for it."""
        self._threads.submit(self._prepare, grammars, ask)

    def _prepare(self, grammars: "Grammars | None", ask: PrepareExtra) -> None:
        failed = None
        if grammars is not None and isinstance(ask.extra, Grammar):
            failed = _compiled(grammars, ask.extra.text)
        self._say(ExtraReady(ask.session, ask.number, failed))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _compiled(grammars: "Grammars", text: str) -> RowFailed | None:
    """None once rows may have it; else why they cannot, by whose doing that is."""
    try:
        error = grammars.compile(text)
    except MatchersLost as lost:
        return lost.failed
    except BaseException as panic:  # the library's panics are no Exceptions; the client waits for an answer
        _log.exception("the grammar library failed")
        return RowFailed(f"the grammar cannot be compiled: {panic}")
    return RowFailed(error) if error else None
