"""What tests of real processes wait for, and where these listen."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable

LIMIT_S = 120  # for hangs


def until(true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait for what only asking can tell. AssertionError when it does not come true."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        threading.Event().wait(0.02)


def ports() -> range:
    """This test process's own, so that two that start meshes at the same time never choose the same one. They are below those that the
    kernel gives to connections."""
    number, count = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("", "_COUNT"))
    each = 20_000 // int(count or 1)
    first = 10_000 + each * int(number.removeprefix("gw") or 0)
    return range(first, first + each)


_given = random.choice(ports())
"""All ports from where this process began up to here are given away: whoever got one may not have bound it yet."""


def free_ports(count: int, *hosts: str) -> int:
    """The first of this many ports in a row that are free on all these addresses, and that nobody is given until all others were."""
    global _given
    while True:
        first = _given if _given + count <= ports().stop else ports().start
        _given = first + count
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for host in hosts:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind((host, port))
            return first


def free_port() -> int:
    return free_ports(1, "127.0.0.1")
