"""With --log-format json: what a child writes to stdout and stderr, a line at a time, as JSON. Owned by children.py and adopted.py."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable

from meshlm.runtime.process.streams import as_json, forgiving

MAX_LINE_BYTES = 64 << 10


class ChildText:
    """The end of a pipe. `name` says whose text it is."""

    def __init__(self, descriptor: int, name: Callable[[], str]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._name = descriptor, name
        self._begun = b""  # a line of it

    @classmethod
    def of_process(cls, pid: int, name: Callable[[], str]) -> "ChildText | None":
        """The text of a process that another supervisor started; None where the process has just ended."""
        with contextlib.suppress(OSError):
            return cls(os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), name)
        return None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._descriptor, self.read, loop)

    def read(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._descriptor < 0:
            return
        try:
            data = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.end(loop)
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MAX_LINE_BYTES:
            lines, self._begun = [*lines, self._begun], b""
        self._pass_on(lines)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._descriptor >= 0:
            loop.remove_reader(self._descriptor)
            self.close()
            self._pass_on([self._begun])

    def close(self) -> None:
        """Nobody watches it yet, or any more."""
        os.close(self._descriptor)
        self._descriptor = -1

    def _pass_on(self, lines: Iterable[bytes]) -> None:
        out = forgiving(sys.stderr)
        for line in filter(bytes.strip, lines):
            out.write(as_json(line.decode("utf-8", "replace"), self._name()))
        out.flush()
