"""A log that is no terminal gets a line when a phase ends, and one every few seconds while it goes on."""

import io

from meshlm.protocol.edges.control import Progress
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.cli.display import StartDisplay

WORKER = Identity(Role.WORKER, 0)


def test_lines_while_weights_load() -> None:
    out, now = io.StringIO(), [0.0]
    display = StartDisplay(out, lambda: now[0])
    for second in range(13):
        now[0] = float(second)
        display.progress(WORKER, Progress("weights", 10 * second, 120, "MB"))
    display.progress(WORKER, Progress("weights", 120, 120, "MB"))
    assert out.getvalue().splitlines() == [
        "[   5.0s] worker/0: weights 50/120 MB",
        "[  10.0s] worker/0: weights 100/120 MB",
        "[  12.0s] worker/0: weights 120/120 MB",
    ]
