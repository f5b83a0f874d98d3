"""`python -m meshlm.supervisor.standby`: a supervisor that follows one that dies, or ends what one has left.

A supervisor keeps one of these (processes/spare.py), with all that is needed loaded. It waits for the supervisor's end; then it takes
the run directory's lock and the mesh, as it stands in the state file. With --end it takes over a mesh whose time without a supervisor
is over (runtime/process/orphan.py), and ends it in good order.
"""

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import setproctitle

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.digest import schema_digest
from meshlm.runtime.process import streams
from meshlm.runtime.process.entry import give_back_memory, import_structlog

import_structlog()

from meshlm.supervisor.cli import serve  # noqa: E402
from meshlm.supervisor.errors import StartError  # noqa: E402
from meshlm.supervisor.io import KILL_AFTER_S  # noqa: E402
from meshlm.supervisor.processes import rundir, state_file  # noqa: E402

OTHER_VERSION = 3  # the exit code of a standby that does not speak the mesh's protocol


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when there was nothing to take over, or that has ended in good order."""
    streams.open_closed()
    parser = argparse.ArgumentParser(prog="meshlm supervisor")
    parser.add_argument(
        "--config-fd", type=int, required=True, help="descriptor with the mesh's configuration and keys"
    )
    parser.add_argument("--parent", type=int, default=0, help="the supervisor that is waited for")
    parser.add_argument("--loaded-fd", type=int, help="descriptor on which to say that all is loaded")
    parser.add_argument("--digest", default="", help="of the protocol that the mesh speaks")
    parser.add_argument("--lock-fd", type=int, default=-1, help="descriptor of the run directory, locked")
    parser.add_argument("--end", action="store_true", help="end the mesh")
    arguments = parser.parse_args(argv)
    with open(arguments.config_fd, "rb") as file:
        config = msgspec.json.decode(file.read(), type=MeshConfig)
    if config.run.log_format == "json":
        streams.json_from_here()
    if arguments.digest and arguments.digest != schema_digest():
        return OTHER_VERSION
    if arguments.parent and not _wait_for_end(arguments.parent, arguments.loaded_fd):
        return 0
    try:
        with rundir.taken_over(Path(config.run.run_dir), arguments.lock_fd) as left:
            if left is not None and left.digest == schema_digest():
                serve.run_left(left, config, end=arguments.end)
            elif arguments.end:
                _end_others(Path(config.run.run_dir), config.run.drain_timeout + KILL_AFTER_S)
    except StartError as error:
        streams.complain(f"meshlm: {error}")
        return 1
    return 0


def _end_others(run_dir: Path, limit_s: float) -> None:
    """End processes that speak another version's protocol: all that they understand is a signal."""
    outline, until = state_file.outline(run_dir), time.monotonic() + limit_s
    left: list[int] = []
    for pid in outline.alive if outline is not None else ():
        with contextlib.suppress(ProcessLookupError):
            left.append(os.pidfd_open(pid))
    _signal(left, signal.SIGTERM)
    while left and (rest_s := until - time.monotonic()) > 0:
        ended, _, _ = select.select(left, (), (), rest_s)
        left = [pidfd for pidfd in left if pidfd not in ended]
    _signal(left, signal.SIGKILL)


def _signal(pidfds: Iterable[int], number: signal.Signals) -> None:
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)


def _wait_for_end(parent: int, loaded_fd: int) -> bool:
    """Say that all is loaded, and return when the parent has ended. False: it had before."""
    setproctitle.setproctitle("meshlm: standby supervisor")
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        return False
    if os.getppid() != parent:
        return False
    give_back_memory()
    os.write(loaded_fd, b"loaded\n")
    os.close(loaded_fd)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll()
    os.close(pidfd)
    return True


if __name__ == "__main__":
    code = main()
    streams.flush()
    sys.exit(code)
