"""What a child of the sandbox may take, and which limit ended one. The kernel enforces them by killing it.

CPU seconds are of the child's own work, so a busy or throttled host is no reason to refuse anything.
"""

import contextlib
import math
import os
import resource
import signal
from enum import Enum

from msgspec import Struct

MIB = 1 << 20
OUT_OF_MEMORY = 97  # the exit code of a child whose Python met the limit of its memory
TOO_DEEP = 98  # likewise of Python's own depth
OOM_FIRST = "1000"  # the kernel ends such a process before any other when the host has no memory left


class Limits(Struct, frozen=True, kw_only=True):
    """Of one child. cpu_s 0: its caller watches its clock."""

    cpu_s: float = 0.0
    memory_bytes: int  # of address space, beyond what the fork server has
    stack_bytes: int
    niceness: int = 0  # added to that of its fork server


class Limit(Enum):
    """What ended a child."""

    CPU = "cpu"
    MEMORY = "memory"
    STACK = "stack"
    WALL = "wall"  # its caller waited no longer
    KILLED = "killed"  # by nothing of ours: the host had no memory left, say


class ChildDied(Exception):
    """The child of a job ended before its answer. The text says which limit it met, as the end of a sentence about the job."""

    def __init__(self, limit: Limit, message: str) -> None:
        super().__init__(message)
        self.limit, self.message = limit, message

    @property
    def is_of_the_job(self) -> bool:
        """The same job would meet it again, here and elsewhere; else the host was busy."""
        return self.limit in (Limit.CPU, Limit.MEMORY, Limit.STACK)


def enforce(limits: Limits) -> None:
    """Have the kernel hold this process to the limits from here on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_STACK, limits.stack_bytes)
    with open("/proc/self/statm", "rb") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, held + limits.memory_bytes)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(OOM_FIRST)
    os.nice(limits.niceness)
    if limits.cpu_s:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _lower(resource.RLIMIT_CPU, math.ceil(used + limits.cpu_s) + 1)  # for a library that takes the timer's signal


def _lower(kind: int, limit: int) -> None:
    """No more than what the host's own limit allows already."""
    _, most = resource.getrlimit(kind)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, limit))


def died_of(status: int, limits: Limits) -> ChildDied:
    """Why a child with this wait status gave no answer."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    if number in (signal.SIGPROF, signal.SIGXCPU):
        return ChildDied(Limit.CPU, f"it takes more than {limits.cpu_s:g} s of CPU time")
    if number in (signal.SIGSEGV, signal.SIGBUS) or code == TOO_DEEP:
        stack = f"more than {limits.stack_bytes // MIB} MiB of stack"
        return ChildDied(Limit.STACK, f"it is nested too deeply ({stack}), or ends the library that reads it")
    allocators = (signal.SIGABRT, signal.SIGILL, signal.SIGTRAP)  # how they end a process
    if number in allocators or code == OUT_OF_MEMORY:
        return ChildDied(Limit.MEMORY, f"it takes more than {limits.memory_bytes // MIB} MiB of memory")
    how = f"signal {number}" if number else f"exit code {code}"
    return ChildDied(Limit.KILLED, f"the process that had it ended ({how})")
