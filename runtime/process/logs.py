"""Logging of a process: structlog to stderr. Configured once, from main, nowhere else.

With --log-format json a child's stderr goes through the supervisor (streams.py), while these lines take a descriptor of their own. Each
line also goes into the process's black box, once it has one (black_box.py). The level may change while the process runs.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from meshlm.protocol.config import RunConfig, log_levels
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process import in_hand
from meshlm.runtime.process.black_box import BlackBox, path_of
from meshlm.runtime.process.readable import readable
from meshlm.runtime.process.streams import LogWriter, complain, forgiving

MAX_FIELD = 4000  # characters of one field of a line
_METHODS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")
_Filtering = {
    level: structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
    for level in log_levels.LEVELS
}
_Everything: Any = _Filtering["debug"]
_box: BlackBox | None = None


class _Logger(_Everything):  # type: ignore[misc]
    """The class of all loggers of this process, which they keep: its methods are those of the level that holds."""


def set_level(level: str) -> None:
    """Log from this level on, in all loggers that there are."""
    for name in _METHODS:
        setattr(_Logger, name, getattr(_Filtering[level], name))


def keep(run_dir: Path, identity: Identity, incarnation: int) -> BlackBox | None:
    """Each line goes into this process's black box too, from now on; None where the run directory has no room for it."""
    global _box
    try:
        _box = BlackBox(path_of(run_dir, identity), incarnation)
    except OSError as error:
        complain(f"{identity}: no last events are kept: {error.strerror}", "warning")
        return None
    in_hand.begin(_box)
    record("process began", process=str(identity), pid=os.getpid())
    return _box


def record(event: str, level: str = "info", **fields: object) -> None:
    """An event for the black box alone."""
    if _box is not None:
        _box.write({"at": time.time(), "level": level, "event": event, **fields})


def configure(config: RunConfig, descriptor: int | None = None, identity: Identity | None = None) -> None:
    """Lines for people (console) or for machines (json), from the level of this process up, to `descriptor` or stderr."""
    set_level(log_levels.level_of(config.log_level, identity))
    renderer: structlog.typing.Processor
    if config.log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=_in_colour(config.log_color), pad_event_to=0)
    out = forgiving(sys.stderr) if descriptor is None else cast(TextIO, LogWriter(descriptor))
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if config.log_format == "console" else "iso"),
            _readable,
            structlog.processors.format_exc_info,  # tracebacks are ours, and have lines
            _kept,
            renderer,
        ],
        wrapper_class=_Logger,
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=True,
    )


def _in_colour(wanted: str) -> bool:
    """NO_COLOR is what many programs have agreed on."""
    return wanted == "always" or (wanted == "auto" and not os.environ.get("NO_COLOR") and sys.stderr.isatty())


def _kept(log: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if _box is not None:
        _box.write({"at": time.time(), **event})
    return event


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
