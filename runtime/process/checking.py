"""`meshlm serve --dry-run` asks a process what it would refuse before it does its work: its module `check`, run as a program.

The supervisor writes the configuration to its stdin (supervisor/cli/plan.py). The last line of its stdout says what is wrong.
"""

import json
import logging
import os
import sys
from collections.abc import Callable

import msgspec
import structlog

from meshlm.protocol.config import MeshConfig
from meshlm.runtime import plugins
from meshlm.runtime.errors import ProcessFatal


def answer(check: Callable[[MeshConfig], None]) -> None:
    """Run the check of a process on the configuration of stdin."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # stdout is the answer's
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=MeshConfig)
    try:
        if config.resolved is not None and config.resolved.general_plugins:
            plugins.run_general(os.environ)
        check(config)
    except (ProcessFatal, plugins.PluginError) as error:
        sys.stdout.write("\n" + json.dumps({"error": str(error)}) + "\n")
