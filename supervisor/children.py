"""Child processes: spawn, notice their end, signal. Called by lives.py and launch.py.

Children are separate programs, never forks of this one, in sessions of their own (a Ctrl-C in the terminal is for the
supervisor alone), and ask the kernel to kill them when the supervisor dies (runtime/entry.py). The configuration is handed to each
in memory, so that none depends on a file that could be removed or be somebody else's.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity, Incarnation, Role

FOLDER = {
    Role.FRONTEND: "frontend",
    Role.DETOKENIZER: "detokenizer",
    Role.COORDINATOR: "coordinator",
    Role.SCHEDULER: "scheduler_proc",
    Role.WORKER: "workers",
}


def command(identity: Identity, incarnation: Incarnation, config_fd: int, standby: int = -1) -> list[str]:
    """The command line of a process of the mesh. `standby`: the descriptor on which it waits for its turn; -1: it begins at once."""
    wait = () if standby < 0 else ("--standby", str(standby))
    return [
        *(sys.executable, "-P", "-m", "meshlm.runtime.entry", FOLDER[identity.role], str(os.getpid())),
        *("--config-fd", str(config_fd), "--identity", str(identity), "--incarnation", str(incarnation)),
        *wait,
    ]


def config_file(config: MeshConfig, role: Role) -> int:
    """A descriptor of a file in memory, which the caller closes. The keys of the API are the frontends' alone."""
    if role is not Role.FRONTEND:
        config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, api_key=()))
    descriptor = os.memfd_create("mesh.json")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(config))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


# Of libgomp's threads while they wait for each other, instead of 300,000: for that long they keep the cores from other processes, and
# from the very thread that they wait for (docs/performance.md, "On a CPU").
SPINS = "1000"


KEYS = ("MESHLM_API_KEY", "VLLM_API_KEY")
"""Variables that hold secrets; no child gets them."""


class Child:
    """One life of one process. A `standby` loads, says so, and begins when it is given its turn. The socket for that stays open
    as long as it lives: it may have its turn before it has said anything."""

    def __init__(
        self, identity: Identity, incarnation: Incarnation, config: MeshConfig, *, standby: bool = False
    ) -> None:
        """OSError when there can be no more processes."""
        self.identity = identity
        self.incarnation = incarnation
        self.loaded = False  # of a standby: it waits for its turn
        self.started_s = time.time()
        self._turn: socket.socket | None = None
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        for name in KEYS:
            environment.pop(name, None)
        if identity.role is Role.WORKER and "OMP_WAIT_POLICY" not in environment:
            environment.setdefault("GOMP_SPINCOUNT", SPINS)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_error:
            theirs.callback(os.close, config_fd := config_file(config, identity.role))
            descriptors = [config_fd]
            if standby:
                self._turn, turn = socket.socketpair()
                on_error.callback(self._turn.close)
                descriptors.append(theirs.enter_context(turn).fileno())
            self._process = subprocess.Popen(
                command(identity, incarnation, *descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
            self.pid = self._process.pid
            on_error.callback(self._end)
            self._pidfd = os.pidfd_open(self.pid)
            on_error.pop_all()

    def _end(self) -> None:
        """No descriptor is left: nobody would see its end."""
        self._process.kill()
        self._process.wait()

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

    def take_turn(
        self, loop: asyncio.AbstractEventLoop, identity: Identity, incarnation: Incarnation, config: MeshConfig
    ) -> bool:
        """Have a standby begin as this life, now or as soon as it is loaded. False when it is gone."""
        assert self._turn is not None
        loop.remove_reader(self._turn)
        try:
            config_fd = config_file(config, identity.role)
            try:
                socket.send_fds(self._turn, [f"{identity} {incarnation}\n".encode()], [config_fd])
            finally:
                os.close(config_fd)
        except OSError:
            self.kill()
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
            self.kill()
            return False

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
