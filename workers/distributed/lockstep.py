"""What workers of ranks that step together agree on before each step.

`StepExchange` is what an engine needs of it: an elementwise maximum of `StepAgreement.columns` over all workers of the group.
`SocketExchange` finds it over Unix sockets: the first worker gathers what all propose and answers with what is agreed. Only the hosts'
threads take part, while the devices compute the step before; and `abort` ends it at once, as no collective can be ended.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from meshlm.protocol.lockstep import StepAgreement, StepGroup

POLL_S = 0.01  # between two looks for others that connect
NUMBERS = struct.Struct("<9q")


class StepAborted(Exception):
    """A worker of the group is gone, or the group is made anew: the step and those after it are not computed."""


class StepExchange(Protocol):
    """Used by the stepper thread, but for `abort`."""

    @property
    def folder(self) -> str:
        """The folder where the group's workers find each other."""

    @property
    def group(self) -> StepGroup: ...

    def connect(self) -> None:
        """Wait for all workers of the group. StepAborted."""

    def agree(self, proposal: StepAgreement) -> StepAgreement:
        """Wait for what all workers propose for this step. StepAborted."""

    def abort(self) -> None:
        """End whatever waits, now and later; called in any thread."""

    def when_aborted(self, call: Callable[[], None]) -> None:
        """Adds a call that `abort` makes too, which ends a device that waits for others."""

    def close(self) -> None:
        """Release what it holds; the stepper uses another one from now on."""


@runtime_checkable
class LockstepEngine(Protocol):
    """An engine whose steps may need those of other ranks."""

    def join(self, exchange: StepExchange | None) -> None:
        """Meet these, and agree with them before each step from now on; None: there is nobody to step with. StepAborted."""


class SocketExchange:
    """See the module docstring. `member` is the worker's number, 0 for the one that gathers."""

    def __init__(self, folder: str, group: StepGroup, member: int) -> None:
        self.folder, self.group = folder, group
        self._path = Path(folder) / f"step-{group.epoch}.sock"
        self._num_workers, self._member = group.num_workers, member
        self._sockets: list[socket.socket] = []  # to all others, or to the one that gathers
        self._lock = threading.Lock()
        self._aborted = False
        self._calls: list[Callable[[], None]] = []  # when it is aborted

    def connect(self) -> None:
        try:
            self._gather() if self._member == 0 else self._reach()
        except OSError as error:
            self.close()
            raise StepAborted(f"the group's sockets failed: {error}") from None

    def _gather(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            try:
                listener.listen(self._num_workers)
                listener.settimeout(POLL_S)
                while len(self._sockets) < self._num_workers - 1:
                    with contextlib.suppress(TimeoutError):
                        self._add(listener.accept()[0])
                    self._check()
            finally:
                self._path.unlink()

    def _reach(self) -> None:
        while not self._sockets:
            self._check()
            reached = socket.socket(socket.AF_UNIX)
            try:
                reached.connect(str(self._path))
            except (FileNotFoundError, ConnectionRefusedError):  # it is not there yet
                reached.close()
                time.sleep(POLL_S)
            else:
                self._add(reached)

    def _add(self, other: socket.socket) -> None:
        other.setblocking(True)
        with self._lock:
            self._sockets.append(other)

    def _check(self) -> None:
        if self._aborted:
            self.close()
            raise StepAborted("the group is made anew")

    def agree(self, proposal: StepAgreement) -> StepAgreement:
        self._check()
        own = tuple(int(number) for number in proposal.columns())
        try:
            if self._member:
                (gathering,) = self._sockets
                gathering.sendall(NUMBERS.pack(*own))
                return StepAgreement.of([NUMBERS.unpack(_exactly(gathering, NUMBERS.size))])
            others = [NUMBERS.unpack(_exactly(one, NUMBERS.size)) for one in self._sockets]
            agreed = StepAgreement.of([own, *others])
            for one in self._sockets:
                one.sendall(NUMBERS.pack(*agreed.columns()))
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise StepAborted(f"the group cannot step: {error or 'a worker is gone'}") from None
        return agreed

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # its close() would not wake who reads
        for call in self._calls:
            call()

    def when_aborted(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def close(self) -> None:
        with self._lock:
            self._aborted = True
            for one in self._sockets:
                one.close()
            self._sockets = []


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := source.recv(size - len(data))):
            raise EOFError
        data += more
    return data
