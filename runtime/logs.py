"""Logging of a process: structlog to stderr. Configured once, from main, nowhere else."""

import logging
import sys

import structlog

from meshlm.protocol.config import RunConfig


def configure(config: RunConfig) -> None:
    """Lines for people (console) or for machines (json), from `log_level` up."""
    renderer: structlog.typing.Processor
    if config.log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if config.log_format == "console" else "iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
