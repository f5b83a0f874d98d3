"""The supervisor's own standby: a process that has loaded what a supervisor needs, and waits for this one's death (standby.py).

Owned by succession.py. It shows in `meshlm status` among the standbys.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.processes import children

AFTER_S = 2.0  # after the mesh was ready or the one before was lost: those that serve need the processor first
AGAIN_S = 30.0  # after one that ended before it had loaded


class Spare:
    """One such process. OSError when there can be no more processes."""

    def __init__(self, config: MeshConfig) -> None:
        self.identity = Identity(Role.SUPERVISOR)
        self.started_s = time.time()
        self.loaded = False
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_error:
            theirs.callback(os.close, config_fd := children.config_file(config, Role.FRONTEND))  # with keys
            self._said, said = os.pipe()
            on_error.callback(os.close, self._said)
            theirs.callback(os.close, said)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "meshlm.supervisor.standby", "--config-fd", str(config_fd)),
                    *("--loaded-fd", str(said), "--parent", str(os.getpid()), "--digest", schema_digest()),
                ],
                pass_fds=(config_fd, said),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            on_error.callback(self._process.wait)
            on_error.callback(self._process.kill)
            self._pidfd = os.pidfd_open(self._process.pid)
            on_error.pop_all()
        self.pid = self._process.pid

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        def readable() -> None:
            loop.remove_reader(self._said)
            self.loaded = bool(os.read(self._said, 16))

        def gone() -> None:
            loop.remove_reader(self._pidfd)
            loop.remove_reader(self._said)
            os.close(self._pidfd)
            os.close(self._said)
            self._process.wait()
            on_exit()

        loop.add_reader(self._said, readable)
        loop.add_reader(self._pidfd, gone)

    def kill(self) -> None:
        self._process.kill()


class Spares:
    """Keeps one there. `config` gives the configuration of now."""

    def __init__(self, config: Callable[[], MeshConfig]) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._one: Spare | None = None
        self._at: float | None = None  # not before

    def there(self) -> list[Spare]:
        """The one that is there, loaded or not yet."""
        return [self._one] if self._one is not None else []

    def keep(self, now: float) -> None:
        """Load one, if there is none and it is time. `now` is of the loop."""
        self._at = now + AFTER_S if self._at is None else self._at
        if self._one is not None or now < self._at:
            return
        try:
            self._one = one = Spare(self._config())
        except OSError:
            self._at = now + AGAIN_S
            return
        one.watch(self._loop, lambda: self._gone(one))

    def renew(self) -> None:
        """The one that is there was loaded from what may have been replaced since."""
        for one in self.there():
            one.kill()

    def _gone(self, one: Spare) -> None:
        if self._one is one:
            self._one = None
            self._at = self._loop.time() + (AFTER_S if one.loaded else AGAIN_S)

    def end(self) -> None:
        for one in self.there():
            self._one = None
            one.kill()
