"""Prepares the extras of requests that wait for a row, beside the steps: the stepper waits for nobody. Owned by io.py."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
from msgspec import Struct

from meshlm.protocol.edges.step import ExtraReady, PrepareExtra, RowFailed
from meshlm.workers.engine import Engine

NUM_THREADS = 2
_log = structlog.get_logger()


class ExtraThreads:
    """`say` sends an answer to the scheduler, from any thread. Each question has one."""

    def __init__(self, say: Callable[[Struct], None]) -> None:
        self._say = say
        self._threads = ThreadPoolExecutor(NUM_THREADS, "extra")

    def submit(self, engine: Engine, question: PrepareExtra) -> None:
        self._threads.submit(self._prepare, engine, question)

    def _prepare(self, engine: Engine, question: PrepareExtra) -> None:
        try:
            failed = engine.extras.prepare(question.extra)
        except BaseException as panic:  # a library's panics are no Exceptions; the client waits for an answer
            _log.exception("an extra cannot be prepared")
            failed = RowFailed(f"the {type(question.extra).__name__.lower()} cannot be compiled: {panic}")
        self._say(ExtraReady(question.session, question.number, failed))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
