"""What a frontend would refuse at its start, for `meshlm serve --dry-run` (runtime/process/checking.py): plug-ins that it cannot
load."""

import os

import structlog

from meshlm.frontend import plugins
from meshlm.frontend.observe.stat_loggers import StatLoggers
from meshlm.protocol.config import MeshConfig
from meshlm.runtime.process.checking import answer


def check(config: MeshConfig) -> None:
    """ProcessFatal names the plug-in."""
    plugins.load(config, 0, StatLoggers(structlog.get_logger()), os.environ)


if __name__ == "__main__":
    answer(check)
