"""Logging of a process: structlog to stderr. Configured once, from main, nowhere else.

With --log-format json a child's stderr goes through the supervisor (streams.py), while these lines take a descriptor of their own.
"""

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO, cast

import structlog

from meshlm.protocol.config import RunConfig
from meshlm.runtime.log_writer import LogWriter
from meshlm.runtime.readable import readable
from meshlm.runtime.streams import forgiving

MAX_FIELD = 4000  # characters of one field of a line


def configure(config: RunConfig, descriptor: int | None = None) -> None:
    """Lines for people (console) or for machines (json), from `log_level` up, to `descriptor` or stderr."""
    renderer: structlog.typing.Processor
    if config.log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    out = forgiving(sys.stderr) if descriptor is None else cast(TextIO, LogWriter(descriptor))
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if config.log_format == "console" else "iso"),
            _readable,
            structlog.processors.format_exc_info,  # tracebacks are ours, and have lines
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=True,
    )


def _readable(log: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Clients name fields, models and requests: what they say is shown, but moves no cursor and makes no line of its own."""
    return {key: readable(value, MAX_FIELD) if isinstance(value, str) else value for key, value in event.items()}


class Limited:
    """A log for what strangers can cause: BURST lines, then PER_SECOND, and how many were left out."""

    BURST = 1000
    PER_SECOND: float = 20

    def __init__(self, log: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._left, self._filled_at, self._left_out = float(self.BURST), clock(), 0

    def warning(self, event: str, **fields: object) -> None:
        self._say("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._say("error", event, fields)

    def _say(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = self._clock()
        self._left = min(self.BURST, self._left + (now - self._filled_at) * self.PER_SECOND)
        self._filled_at = now
        if self._left < 1:
            self._left_out += 1
            return
        self._left -= 1
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        getattr(self._log, level)(event, **fields)
