"""`meshlm serve --dry-run` asks a process what it would refuse before it does its work: its module `check`, run as a program.

The supervisor writes the configuration to its stdin (supervisor/cli/checks.py). The last line of its stdout says what is wrong.
"""

import json
import sys
from collections.abc import Callable

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.errors import ProcessFatal


def answer(check: Callable[[MeshConfig], None]) -> None:
    """Run the check of a process on the configuration of stdin."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=MeshConfig)
    try:
        check(config)
    except ProcessFatal as error:
        sys.stdout.write("\n" + json.dumps({"error": str(error)}) + "\n")
