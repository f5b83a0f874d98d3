"""A process's own side of its sandbox: it has the fork server started, asks for children, and waits for what they answer.

Safe to call from several threads, each of which waits for its own child. Answers are bytes, and whatever is in them the caller
decodes as it would a stranger's. A child that died is told with the limit that it met (`ChildDied`); the next one is a new one.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from meshlm.runtime.sandbox.fork_server import ANSWERED, ENDED, HEAD, MAX_ASK, STARTED
from meshlm.runtime.sandbox.limits import ChildDied, Limit, Limits, died_of

START_S = 600.0  # the fork server loads a vocabulary, on a host that may be throttled
END_S = 60.0  # of a child that closed its socket
# Threads that wait at the fork would be missing behind it.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "GLIBC_TUNABLES": "",  # a worker's large pages, each of which a child would copy with its first write
}


class SandboxFailed(Exception):
    """The job failed, or no child could be had; the text says why."""


class NoChild(SandboxFailed):
    """No child could be had: that is no fault of the job's, which may go well another time."""


class Child:
    """One child on its way. `socket` is connected to it."""

    def __init__(self, connected: socket.socket, status: int, limits: Limits) -> None:
        self.socket, self._status, self._limits = connected, status, limits
        self.pid, self._pidfd = 0, -1

    def began(self, within_s: float = START_S) -> None:
        """Waits until it is forked. NoChild when it cannot be."""
        data = _read(self._status, STARTED.size, within_s)
        if len(data) < STARTED.size:
            raise NoChild("no process could be started for it")
        (self.pid,) = STARTED.unpack(data)
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)

    def died(self) -> ChildDied:
        """Why its socket closed before its answer."""
        data = _read(self._status, ENDED.size, END_S)
        if len(data) < ENDED.size:
            return ChildDied(Limit.KILLED, "the process that started it ended")
        return died_of(ENDED.unpack(data)[0], self._limits)

    def cpu_s(self) -> float:
        """The CPU time that it took so far; 0 once it is gone."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)  # the kernel's name of another process's clock
        except OSError:
            return 0.0

    def kill(self) -> None:
        """Whoever waits for its socket sees that end. `close` is still to be called."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """It is killed, if it is still there. No thread waits for it any more."""
        self.socket.close()
        for descriptor in (self._status, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._status = self._pidfd = -1


class Sandbox:
    """`target`: the module whose `make(argument)` the fork server calls once, and each child then uses. `title` is what `ps` shows."""

    def __init__(self, target: str, argument: bytes, title: str) -> None:
        self._target, self._argument, self._title = target, argument, title
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Have the fork server load ahead of the first job. Returns at once."""
        with self._lock:
            self._started()

    def _started(self) -> socket.socket:
        """The control socket of a fork server that lives."""
        if self._is_closed:
            raise NoChild("this process ends")
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs, _file_of(self._argument) as argument:
            command = [
                *(sys.executable, "-P", "-m", "meshlm.runtime.process.entry", "runtime.sandbox", str(os.getpid())),
                *("--target", self._target, "--title", self._title),
                *("--argument", str(argument), "--control", str(theirs.fileno())),
            ]
            self._process = _kept(command, (theirs.fileno(), argument))
        self._control = ours
        return ours

    def open(self, limits: Limits, descriptors: Sequence[int] = ()) -> Child:
        """A new child, with these descriptors. NoChild."""
        try:
            return self._opened(limits, descriptors)
        except OSError as error:  # no descriptors, say
            raise NoChild(f"no process could be started for it: {error}") from None

    def _opened(self, limits: Limits, descriptors: Sequence[int]) -> Child:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        child = Child(ours, read, limits)
        try:
            with theirs:
                self._ask(limits, [theirs.fileno(), write, *descriptors])
            os.close(write)
            write = -1
            child.began()
        except BaseException:
            child.close()
            raise
        finally:
            if write >= 0:
                os.close(write)
        return child

    def _ask(self, limits: Limits, descriptors: list[int]) -> None:
        data = msgspec.json.encode(limits)
        assert len(data) < MAX_ASK
        with self._lock:
            for is_last in (False, True):
                try:
                    socket.send_fds(self._started(), [data], descriptors)
                    return
                except OSError as error:  # it died: a new one
                    self._end()
                    if is_last:
                        raise NoChild(f"no process could be started for it: {error}") from None

    def run(self, job: bytes, limits: Limits, wall_s: float) -> bytes:
        """The answer of one child to one job. ChildDied, SandboxFailed."""
        with contextlib.closing(self.open(limits)) as child:
            answer = _exchanged(child.socket, job, time.monotonic() + wall_s)
            if answer is None:
                raise ChildDied(Limit.WALL, f"it was not done within {wall_s:g} s; the host is busy")
            if len(answer) < HEAD.size:
                raise child.died()
            kind, length = HEAD.unpack_from(answer)
            if len(answer) < HEAD.size + length:
                raise child.died()
            if kind != ANSWERED:
                raise SandboxFailed(answer[HEAD.size :].decode("utf-8", "replace"))
            return answer[HEAD.size :]

    def close(self) -> None:
        """The fork server ends, and its children with it."""
        with self._lock:
            self._is_closed = True
            self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()  # the thread that started it reaps it
            self._process = None


def _kept(command: list[str], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Starts a process in a thread that stays as long as it: the kernel ends it with the thread that started it."""
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                command, pass_fds=descriptors, stdin=subprocess.DEVNULL, env={**os.environ, **ONE_THREAD}
            )
        except BaseException as error:  # whoever asked raises it
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=keep, daemon=True, name="sandbox").start()
    return started.result()


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[int]:
    """The descriptor of a file in memory, for another process to read."""
    descriptor = os.memfd_create("argument")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(pipe: int, length: int, within_s: float) -> bytes:
    """So many bytes; fewer where it was closed before, or time is over."""
    data, until = b"", time.monotonic() + within_s
    while len(data) < length and _ready(pipe, select.POLLIN, until):
        if not (piece := os.read(pipe, length - len(data))):
            break
        data += piece
    return data


def _ready(descriptor: int, events: int, until: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))


def _exchanged(connected: socket.socket, job: bytes, until: float) -> bytes | None:
    """What the child says up to its end, when it was told the job; None where time is over. It may end before it has read all."""
    connected.setblocking(False)
    answer, left = bytearray(), memoryview(job)
    with contextlib.suppress(ConnectionError):
        while left:
            if not _ready(connected.fileno(), select.POLLOUT, until):
                return None
            left = left[connected.send(left) :]
        connected.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError):
        while _ready(connected.fileno(), select.POLLIN, until):
            if not (piece := connected.recv(1 << 20)):
                return bytes(answer)
            answer += piece
        return None
    return bytes(answer)


class Busy(Exception):
    """Too many jobs wait already: try again."""


class LaneConfig(Struct, frozen=True, kw_only=True):
    num_quick: int = 2  # children at a time
    quick_cpu_s: float = 0.1
    num_slow: int = 1
    max_slow_waiting: int = 4  # Busy beyond
    wall_s: float = 300.0


DEFAULT = LaneConfig()
ANY = 1 << 30


class Lanes:
    """Children for quick jobs and slow ones: the quick never wait for the slow. `run` is called in threads, of which there should be
    `num_threads`; others wait.

    A job begins in the quick lane, with a little CPU time. What needs more is ended there and begins again in the slow lane, where few
    run at a time, below others' priority, and few may wait. So whoever sends jobs that run into their limits has each of them wait for
    the others, and a bound on what they take together; ordinary jobs, which take a few milliseconds, pass."""

    def __init__(self, sandbox: Sandbox, limits: Limits, config: LaneConfig = DEFAULT) -> None:
        """limits: of a slow job."""
        self._sandbox, self._limits, self._config = sandbox, limits, config
        self._quick = _Lane(config.num_quick, ANY)
        self._slow = _Lane(config.num_slow, config.max_slow_waiting)

    @property
    def num_threads(self) -> int:
        """So many that those in the slow lane leave enough to the quick one."""
        config = self._config
        return 2 * config.num_quick + config.num_slow + config.max_slow_waiting

    def run(self, job: bytes) -> bytes:
        """Its answer. ChildDied, SandboxFailed, Busy."""
        quick = msgspec.structs.replace(self._limits, cpu_s=self._config.quick_cpu_s, niceness=0)
        try:
            with self._quick.place():
                return self._sandbox.run(job, quick, self._config.wall_s)
        except ChildDied as died:
            if died.limit is not Limit.CPU:
                raise
        with self._slow.place():
            return self._sandbox.run(job, self._limits, self._config.wall_s)


class _Lane:
    """So many run, so many wait, in the order in which they came."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free, self._most_waiting = running, waiting
        self._waiting: list[threading.Event] = []
        self._lock = threading.Lock()

    @contextmanager
    def place(self) -> Iterator[None]:
        turn = threading.Event()
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set()
            elif len(self._waiting) >= self._most_waiting:
                raise Busy
            else:
                self._waiting.append(turn)
        turn.wait()
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.pop(0).set()
                else:
                    self._free += 1
