"""Child processes: spawn, notice their end, signal. Called by lives.py only.

Children are separate programs, never forks of this one, in sessions of their own (a Ctrl-C in the terminal is for the
supervisor alone), and ask the kernel to kill them when the supervisor dies.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
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


def command(config_file: Path, identity: Identity, incarnation: Incarnation, standby: int = -1) -> list[str]:
    """The command line of a process of the mesh. `standby`: the descriptor on which it waits for its turn; -1: it begins at once."""
    wait = () if standby < 0 else ("--standby", str(standby))
    return [
        *(sys.executable, "-P", "-m", f"meshlm.{FOLDER[identity.role]}"),
        *("--config", str(config_file), "--identity", str(identity), "--incarnation", str(incarnation)),
        *wait,
    ]


# Of libgomp's threads while they wait for each other, instead of 300,000: for that long they keep the cores from other processes, and
# from the very thread that they wait for (docs/performance.md, "On a CPU").
SPINS = "1000"


class Child:
    """One life of one process. A `standby` loads, says so, and begins when it is given its turn. The socket for that stays open
    as long as it lives: it may have its turn before it has said anything."""

    def __init__(
        self, identity: Identity, incarnation: Incarnation, config_file: Path, *, standby: bool = False
    ) -> None:
        """OSError when there can be no more processes."""
        self.identity = identity
        self.incarnation = incarnation
        self.loaded = False  # of a standby: it waits for its turn
        self.started_s = time.time()
        self._turn: socket.socket | None = None
        theirs: socket.socket | None = None
        if standby:
            self._turn, theirs = socket.socketpair()
        descriptors = (theirs.fileno(),) if theirs is not None else ()
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        environment.pop("MESHLM_API_KEY", None)  # it is in mesh.json, for the frontends
        if identity.role is Role.WORKER and "OMP_WAIT_POLICY" not in environment:
            environment.setdefault("GOMP_SPINCOUNT", SPINS)
        try:
            self._process = subprocess.Popen(
                command(config_file, identity, incarnation, *descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        except OSError:
            if self._turn is not None:
                self._turn.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left: nobody would see its end
            self._process.kill()
            self._process.wait()
            if self._turn is not None:
                self._turn.close()
            raise

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[["Child", int], None]) -> None:
        """Call on_exit(self, code) once, when the process is gone and reaped; code < 0 is a signal."""

        def gone() -> None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            if self._turn is not None:
                loop.remove_reader(self._turn)
                self._turn.close()
            on_exit(self, self._process.wait())

        loop.add_reader(self._pidfd, gone)

    def when_loaded(self, loop: asyncio.AbstractEventLoop, on_loaded: Callable[["Child"], None]) -> None:
        """Of a standby: call on_loaded(self) once. When it ends before, on_exit comes instead."""
        turn = self._turn
        assert turn is not None

        def readable() -> None:
            loop.remove_reader(turn)
            if turn.recv(16):
                self.loaded = True
                on_loaded(self)

        loop.add_reader(turn, readable)

    def take_turn(self, loop: asyncio.AbstractEventLoop, identity: Identity, incarnation: Incarnation) -> bool:
        """Have a standby begin as this life, now or as soon as it is loaded. False when it is gone."""
        assert self._turn is not None
        loop.remove_reader(self._turn)
        try:
            self._turn.send(f"{identity} {incarnation}\n".encode())
        except OSError:
            return False
        self.identity, self.incarnation = identity, incarnation
        return True

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
