"""What tests of real processes wait for, and where these listen."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable

LIMIT_S = 40


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


def free_port() -> int:
    while True:
        port = random.choice(ports())
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
