"""stdin, stdout and stderr of a process: there even where they were closed, writing to them never fails, and JSON where that is wanted.

With --log-format json each line of the whole mesh is a JSON object: in the supervisor JsonLines stands in for sys.stderr, and what
libraries, the interpreter or a crash write in a child goes through the supervisor (supervisor/processes/children.py). This module
imports little, because every command imports it.
"""

import contextlib
import datetime
import functools
import io
import json
import os
import select
import socket
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO, cast

MAX_WAITING_BYTES = 1 << 20


class LogWriter:
    """Text for a descriptor, line by line, whose reader may be slow, stopped or gone. Writing never waits and never fails.

    A pipe holds 64 KiB. A process that waited there for a reader that has stopped would serve nobody, so lines wait in memory and a
    thread writes them when there is room. Beyond MAX_WAITING_BYTES they are left out, and how many is said."""

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
            as_json = f'{{"event": "{text}", "level": "warning", "left_out": {count}}}'
            self._begun = f"{as_json if is_json else text}\n"
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


LAST_LINES_S = 0.5


def open_closed() -> None:
    """Give those that were closed (`2>&-`) to /dev/null: else the next file or socket would take their numbers."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            opened_as = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  # for life
            setattr(sys, name, opened_as)
            setattr(sys, f"__{name}__", opened_as)


class _Forgiving:
    """Text for a reader that may have left (`meshlm serve 2>&1 | head`): what nobody reads is dropped, and no signal, request or
    restart fails on it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed here
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()


def forgiving(out: TextIO) -> TextIO:
    """`out`, but writing to it never fails; stderr does not make anybody wait either."""
    if out is sys.__stderr__:
        with contextlib.suppress(OSError, ValueError):
            return cast(TextIO, _writer_of(out.fileno()))
    return cast(TextIO, _Forgiving(out))


@functools.cache
def _writer_of(descriptor: int) -> LogWriter:
    return LogWriter(descriptor)


def json_line(event: str, level: str = "warning", **fields: object) -> str:
    """One line with the keys that structlog's lines have."""
    at = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({**fields, "event": event, "level": level, "timestamp": at}) + "\n"


def as_json(line: str, process: str) -> str:
    """A line of text as one of JSON; what is a JSON object stays as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        if line.startswith("{") and isinstance(json.loads(line), dict):
            return line + "\n"
    return json_line(line, process=process)


class JsonLines(io.TextIOBase):
    def __init__(self, out: TextIO, process: str) -> None:
        self._out, self._process, self._begun = forgiving(out), process, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._out.write(as_json(line, self._process))
        self._out.flush()
        return len(text)

    def say(self, event: str, level: str) -> None:
        """One event, whatever it looks like."""
        self._out.write(json_line(event, level, process=self._process))
        self._out.flush()


def json_from_here(process: str = "supervisor") -> None:
    """Make stderr of this process JSON from now on."""
    if not isinstance(sys.stderr, JsonLines):
        sys.stderr = JsonLines(sys.stderr, process)


def complain(text: str, level: str = "error") -> None:
    """A line of a command for its user, on stderr; nothing fails where nobody can read it. `level` is for collectors."""
    if isinstance(sys.stderr, JsonLines):
        sys.stderr.say(text, level)
    else:
        print(text, file=forgiving(sys.stderr), flush=True)


def flush() -> None:
    """Writes the last lines out, where that takes a moment only: a process that ends at once does not do that by itself."""
    for stream in (sys.stdout, sys.stderr):
        forgiving(stream).flush()
    if sys.__stderr__ is not None and isinstance(writer := forgiving(sys.__stderr__), LogWriter):
        writer.wait(LAST_LINES_S)
