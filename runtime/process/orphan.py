"""What becomes of a process of the mesh whose supervisor has died: it serves on, for --orphan-grace seconds at most.

Until a supervisor says that it is to be outlived (`Supervised`) the kernel kills the process with it (entry.py). From then on the
process watches the supervisor's pidfd. When that is gone the standby of the supervisor, or a `meshlm serve` with this run directory,
takes the mesh over and says so; whoever is not told in time is an orphan for long enough. Of these one, the first to have the run
directory's lock, starts a supervisor that ends the mesh in good order (supervisor/standby.py): with the limits for running requests,
with those that hang, and with the files. Where even that cannot be done the process ends by itself, at the latest by an alarm clock of
the kernel's.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import Supervised
from meshlm.runtime.process import entry, logs

AGAIN_S = 0.5  # somebody has the lock: it takes the mesh over, or ends it
LATE_S = 30.0  # after the grace and the drain time: nobody ended this process, and it did not end itself
ENDER = "meshlm.supervisor.standby"


class Orphan:
    """The process's view of its supervisor. `on_lost` is told of its death, `end` has this process drain and end."""

    def __init__(self, config: MeshConfig, on_lost: Callable[[], None], end: Callable[[], None]) -> None:
        self._config, self._on_lost, self._end = config, on_lost, end
        self._grace_s = 0.0
        self._pidfd = self._text = -1
        self._over: asyncio.TimerHandle | None = None

    def supervised(self, message: Supervised) -> None:
        """A supervisor is there, the first or another one."""
        loop = asyncio.get_running_loop()
        self._forget(loop)
        self._grace_s = message.grace_s
        try:
            self._pidfd = os.pidfd_open(message.pid)
        except ProcessLookupError:
            self._lost(loop)
            return
        entry.outlive(message.pid)
        if self._text < 0 and self._config.run.log_format == "json":
            self._text = _reader_of(2)
        loop.add_reader(self._pidfd, self._lost, loop)

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._over is not None:
            self._over.cancel()
            self._over = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _lost(self, loop: asyncio.AbstractEventLoop) -> None:
        self._forget(loop)
        logs.record("the supervisor has died", "warning", grace_s=self._grace_s)
        # SIGALRM has no handler here: the kernel ends the process.
        signal.setitimer(signal.ITIMER_REAL, self._grace_s + self._config.run.drain_timeout + LATE_S)
        self._over = loop.call_later(self._grace_s, self._grace_is_over, loop)
        self._on_lost()

    def _grace_is_over(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            directory = os.open(self._config.run.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.ExitStack() as ours:
                ours.callback(os.close, directory)
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                start_ender(self._config, directory)
        except BlockingIOError:
            self._over = loop.call_later(AGAIN_S, self._grace_is_over, loop)
        except OSError as error:  # no directory any more, or no room for a process
            logs.record("nobody ends the mesh", "error", reason=str(error))
            self._end()
        else:
            self._over = loop.call_later(LATE_S, self._end)  # it is told, or asked to end, long before


def start_ender(config: MeshConfig, directory: int, *, wait: bool = False) -> int:
    """Start a supervisor that takes the mesh over to end it. It inherits the locked run directory. Its exit code, after its end where
    that is waited for. OSError."""
    config_fd = os.memfd_create("mesh.json")
    try:
        Path(f"/proc/self/fd/{config_fd}").write_bytes(msgspec.json.encode(config))
        command = [
            sys.executable,
            "-P",
            "-m",
            ENDER,
            "--config-fd",
            str(config_fd),
            "--lock-fd",
            str(directory),
            "--end",
        ]
        passed = (config_fd, directory)
        ender = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True)
    finally:
        os.close(config_fd)
    return ender.wait() if wait else 0


def _reader_of(descriptor: int) -> int:
    """Another reader of the pipe that this process writes to: what libraries print there is no error while no supervisor reads it."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return -1
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
