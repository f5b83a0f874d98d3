"""What the sandbox's tests have done in its children; `make` is called once, in the fork server."""

import ctypes
import os
import signal

from meshlm.runtime.sandbox.fork_server import Handle, answering

MIB = 1 << 20


def make(argument: bytes) -> Handle:
    made_in = str(os.getpid()).encode()

    def work(job: bytes) -> bytes:
        what, _, rest = job.partition(b" ")
        match what:
            case b"echo":
                return argument + rest
            case b"who":
                return made_in + b" " + str(os.getpid()).encode()
            case b"spin":
                while True:
                    sum(range(1000))
            case b"take":
                return str(len(bytearray(int(rest) * MIB))).encode()
            case b"fault":
                ctypes.string_at(0)
            case b"end":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"sleep":
                signal.pause()
            case b"recurse":
                return _stack_used(int(rest) * MIB)
            case b"quote":
                os.write(2, rest)
        raise ValueError(job.decode())

    return answering(work)


def _stack_used(size: int) -> bytes:
    """Writes to the C stack so far below its top, as deep recursion of native code does."""
    with open("/proc/self/maps") as maps:
        (line,) = (line for line in maps if line.endswith("[stack]\n"))
    top = int(line.split("-")[1].split()[0], 16)
    for below in range(0, size, 4096):
        ctypes.memset(top - below - 4096, 0, 1)
    return b"touched"
