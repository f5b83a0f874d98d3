"""Logging never fails, whoever stops reading."""

import contextlib
import os

from meshlm.protocol.edges.control import Progress
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.streams import forgiving
from meshlm.supervisor.cli.display import StartDisplay


def test_a_reader_that_left_hurts_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    out = os.fdopen(writing, "w")
    print("a line", file=forgiving(out), flush=True)
    display = StartDisplay(out)
    display.line("stopping")
    display.progress(Identity(Role.WORKER, 0), Progress("weights", 1, 2))
    with contextlib.suppress(BrokenPipeError):
        out.close()


def test_nor_one_that_is_closed() -> None:
    out = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    out.close()
    print("a line", file=forgiving(out), flush=True)
