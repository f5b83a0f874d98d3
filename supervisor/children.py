"""Child processes: spawn, notice their end, signal. Called by io.py only.

Children are separate programs, never forks of this one, in sessions of their own (a Ctrl-C in the terminal is for the
supervisor alone), and ask the kernel to kill them when the supervisor dies.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from meshlm.protocol.ids import Identity, Incarnation, Role

FOLDER = {
    Role.FRONTEND: "frontend",
    Role.DETOKENIZER: "detokenizer",
    Role.COORDINATOR: "coordinator",
    Role.SCHEDULER: "scheduler_proc",
    Role.WORKER: "workers",
}


def command(config_file: Path, identity: Identity, incarnation: Incarnation) -> list[str]:
    """The command line of a process of the mesh."""
    return [
        *(sys.executable, "-P", "-m", f"meshlm.{FOLDER[identity.role]}"),
        *("--config", str(config_file), "--identity", str(identity), "--incarnation", str(incarnation)),
    ]


class Child:
    """One life of one process."""

    def __init__(self, identity: Identity, incarnation: Incarnation, config_file: Path) -> None:
        self.identity = identity
        self.incarnation = incarnation
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            command(config_file, identity, incarnation),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[["Child", int], None]) -> None:
        """Call on_exit(self, code) once, when the process is gone and reaped; code < 0 is a signal."""

        def gone() -> None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            on_exit(self, self._process.wait())

        loop.add_reader(self._pidfd, gone)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process; nothing happens when it is gone already."""
        self._process.send_signal(number)

    def is_stopped(self) -> bool:
        """By SIGSTOP or a terminal."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
