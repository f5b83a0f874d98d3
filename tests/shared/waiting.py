"""What tests of real processes wait for, and where these listen."""

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


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
