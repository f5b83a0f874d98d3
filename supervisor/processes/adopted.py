"""A process of the mesh that another supervisor started, and that has outlived it. Its end is seen, its exit code is not.

incarnations.py has these beside its own children (children.py).
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

from meshlm.supervisor.group.core import UNSEEN_END
from meshlm.supervisor.group.succession import Place
from meshlm.supervisor.processes import proc_stat
from meshlm.supervisor.processes.child_text import ChildText


class Adopted:
    """ProcessLookupError when the process is gone. `has_pipe`: what it prints goes to a pipe of its own (--log-format json)."""

    def __init__(self, place: Place, *, has_pipe: bool) -> None:
        self.identity, self.incarnation, self.pid = place.identity, place.incarnation, place.pid
        self.loaded = False
        self.started_s = time.time()
        self._pidfd = os.pidfd_open(place.pid)
        if not proc_stat.runs(
            place.pid, place.start_ticks
        ):  # asked now that the pid cannot become another one's unnoticed
            os.close(self._pidfd)
            raise ProcessLookupError(f"{place.identity} has ended")
        self._text = ChildText.of_process(place.pid, lambda: str(place.identity)) if has_pipe else None

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[["Adopted", int], None]) -> None:
        """Call on_exit(self, UNSEEN_END) once, when the process is gone. Its parent, whoever that is now, reaps it."""

        def gone() -> None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            if self._text is not None:
                self._text.read(loop)
                self._text.end(loop)
            on_exit(self, UNSEEN_END)

        loop.add_reader(self._pidfd, gone)
        if self._text is not None:
            self._text.watch(loop)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process; nothing happens when it is gone already."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def is_stopped(self) -> bool:
        found = proc_stat.of(self.pid)
        return found is not None and found.state == "T"

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
