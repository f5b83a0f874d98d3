"""The process that forks the children: it has imported and loaded what they need, so each begins warm, in milliseconds.

It takes one descriptor pair for each child over its control socket: the child's own socket, and a pipe on which this process writes
the child's number when it begins and its wait status when it ended. Who closes the other end of that pipe wants the child killed.
It has one thread, parses nothing that a client sent, and ends with the process that started it, as its children do with it.
"""

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import NoReturn

import msgspec
import setproctitle

from meshlm.runtime.process.entry import die_with, give_back_memory
from meshlm.runtime.sandbox.limits import OUT_OF_MEMORY, TOO_DEEP, Limits, enforce

STARTED = struct.Struct("<i")  # the child's number
ENDED = struct.Struct("<i")  # its wait status
HEAD = struct.Struct("<BQ")  # of an answer: its kind and length
ANSWERED, RAISED = 0, 1
MAX_ASK = 4096
LAST_WORDS = 1000  # bytes of what could not be loaded
BROKEN = 1  # the exit code of a child that failed otherwise

Handle = Callable[[socket.socket, list[int]], None]
"""What a child does with its socket, and with the descriptors that came with it."""


def answering(work: Callable[[bytes], bytes]) -> Handle:
    """A child that reads one job to its end, answers and is done. What it raises is answered, too: the first byte says which it is."""

    def handle(job: socket.socket, _descriptors: list[int]) -> None:
        data = bytearray()
        while piece := job.recv(1 << 20):
            data += piece
        try:
            kind, answer = ANSWERED, work(bytes(data))
        except (MemoryError, RecursionError):
            raise
        except BaseException as error:  # a panic of a library's is no Exception
            kind, answer = RAISED, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:LAST_WORDS]
        job.sendall(HEAD.pack(kind, len(answer)))
        job.sendall(answer)

    return handle


class ForkServer:
    """The process that forks a child for each job, and never runs one itself."""

    def __init__(self, control: socket.socket, handle: Handle) -> None:
        self._control, self._handle = control, handle
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._children: dict[int, tuple[int, int]] = {}  # by pidfd: number, and the pipe for its status
        self._pids: dict[int, int] = {}  # by that pipe

    def run(self) -> NoReturn:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                elif descriptor in self._pids:  # nobody waits for it any more
                    self._poll.unregister(descriptor)
                    os.kill(self._pids.pop(descriptor), signal.SIGKILL)
                elif descriptor == self._control.fileno():
                    self._begin()

    def _begin(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, MAX_ASK, 8)
        if not data:
            os._exit(0)
        job, status, *others = descriptors
        limits = msgspec.json.decode(data, type=Limits)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1  # the caller sees its socket close
        if pid == 0:
            _be_child(parent, job, others, limits, self._handle)
        for each in (job, *others):
            os.close(each)
        if pid < 0:
            os.close(status)
            return
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, status
        self._poll.register(pidfd, select.POLLIN)
        self._pids[status] = pid
        self._poll.register(status, 0)
        _write(status, STARTED.pack(pid))

    def _reap(self, pidfd: int) -> None:
        pid, status = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        if self._pids.pop(status, None) is not None:
            self._poll.unregister(status)
        _write(status, ENDED.pack(os.waitpid(pid, 0)[1]))
        os.close(status)


def _write(pipe: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, data)


def _be_child(parent: int, job: int, descriptors: list[int], limits: Limits, handle: Handle) -> NoReturn:
    code = BROKEN
    try:
        die_with(parent)
        silent = os.open(os.devnull, os.O_RDWR)  # a library's own complaints quote what the client sent
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        enforce(limits)
        with socket.socket(fileno=job) as connected:
            handle(connected, descriptors)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except RecursionError:
        code = TOO_DEEP
    finally:
        os._exit(code)


def main() -> NoReturn:
    """`--target` names a module with `make(argument) -> Handle`."""
    parser = argparse.ArgumentParser(prog="meshlm sandbox")
    parser.add_argument("--target", required=True)
    parser.add_argument("--title", required=True)
    parser.add_argument("--argument", type=int, required=True, help="descriptor of a file in memory")
    parser.add_argument("--control", type=int, required=True, help="descriptor of the socket of the process that asks")
    arguments = parser.parse_args()
    setproctitle.setproctitle(f"meshlm: {arguments.title}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with open(arguments.argument, "rb") as file:
        argument = file.read()
    handle = importlib.import_module(arguments.target).make(argument)
    give_back_memory()
    gc.collect()
    gc.freeze()  # pages that children share stay shared
    with socket.socket(fileno=arguments.control) as control:
        ForkServer(control, handle).run()
