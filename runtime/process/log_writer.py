"""Log lines for a reader that may be slow, stopped or gone: no process waits for it.

A pipe holds 64 KiB. A process that waited there for a reader that has stopped would serve nobody, so lines wait in memory and a thread
writes them when there is room. Beyond MAX_WAITING_BYTES they are left out, and how many is said.
"""

import contextlib
import os
import select
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 1 << 20


class LogWriter:
    """Text for a descriptor, line by line. Writing never waits and never fails."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._write_some, self.close = without_waiting(descriptor)
        self._lock = threading.Lock()
        self._begun = ""  # no newline or flush has come yet
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = self._num_left_out = 0
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        with self._lock:
            self._begun += text
            if text.endswith("\n"):
                self._emit()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._emit()

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def wait(self, limit_s: float) -> None:
        """Waits until all is written."""
        if (thread := self._thread) is not None:
            thread.join(limit_s)

    def _emit(self) -> None:
        data, self._begun = self._begun.encode("utf-8", "backslashreplace"), ""
        if not data:
            return
        if not self._waiting:
            data = self._rest(data)
        if not data:
            return
        if self._num_waiting_bytes + len(data) > MAX_WAITING_BYTES:
            self._num_left_out += 1
            return
        self._waiting.append(data)
        self._num_waiting_bytes += len(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_waiting, name="log", daemon=True)
            self._thread.start()

    def _rest(self, data: bytes) -> bytes:
        """Write what there is room for; what is left. A reader that is gone has had it all."""
        try:
            return data[self._write_some(data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""

    def _write_waiting(self) -> None:
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        while True:
            with contextlib.suppress(OSError):
                room.poll()
            with self._lock:
                data = self._waiting.popleft()
                self._num_waiting_bytes -= len(data)
                if rest := self._rest(data):
                    self._waiting.appendleft(rest)
                    self._num_waiting_bytes += len(rest)
                elif not self._waiting:
                    self._thread = None
                    self._say_left_out(is_json=data.endswith(b"}\n"))
                    return

    def _say_left_out(self, *, is_json: bool) -> None:
        count, self._num_left_out = self._num_left_out, 0
        if count:
            text = f"{count} log lines were left out: they were not read in time"
            self._begun = (
                f'{{"event": "{text}", "level": "warning", "left_out": {count}}}\n' if is_json else text + "\n"
            )
            self._emit()


def without_waiting(descriptor: int) -> tuple[Callable[[bytes], int], Callable[[], None]]:
    """How to write to it, with BlockingIOError where a pipe or a socket has no room, and how to end that. The flag for it must not be
    set for all who share the descriptor."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):  # the journal's
        own = socket.socket(fileno=os.dup(descriptor))
        return lambda data: own.send(data, socket.MSG_DONTWAIT), own.close
    if stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):  # another user's, or without a reader
            opened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return lambda data: os.write(opened, data), lambda: os.close(opened)
    return lambda data: os.write(descriptor, data), lambda: None
