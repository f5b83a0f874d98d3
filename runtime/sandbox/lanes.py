"""Who has a child of the sandbox when: the quick never wait for the slow.

A job begins in the quick lane, with a little CPU time. What needs more is ended there and begins again in the slow lane, where few run
at a time, below others' priority, and few may wait. So whoever sends jobs that run into their limits has each of them wait for the
others, and a bound on what they take together; ordinary jobs, which take a few milliseconds, pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from meshlm.runtime.sandbox.limits import ChildDied, Limit, Limits
from meshlm.runtime.sandbox.sandbox import Sandbox


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
    """Children for quick jobs and slow ones. `run` is called in threads, of which there should be `num_threads`; others wait."""

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
