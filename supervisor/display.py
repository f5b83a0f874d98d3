"""What the user sees while the mesh starts: one line per piece of news, redrawn in place on a terminal."""

import sys
import time
from typing import TextIO

from meshlm.protocol.control_edge import Progress
from meshlm.protocol.ids import Identity
from meshlm.runtime.logs import forgiving


class StartDisplay:
    """Prints progress to `out` (stderr): in place on a terminal, a line per tenth of the way elsewhere."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out = forgiving(out)
        self._live = out.isatty()
        self._shown: dict[tuple[Identity, str], int] = {}
        self._open_line = False
        self._started = time.monotonic()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._close_line()
        print(f"[{time.monotonic() - self._started:6.1f}s] {text}", file=self._out, flush=True)

    def progress(self, identity: Identity, news: Progress) -> None:
        """News of one phase of one process."""
        amount = f" {news.done}/{news.total} {news.unit}".rstrip() if news.total else ""
        text = f"{identity}: {news.phase}{amount}"
        finished = news.done >= news.total
        if self._live and not finished:
            print(f"\r\x1b[2K[{time.monotonic() - self._started:6.1f}s] {text}", end="", file=self._out, flush=True)
            self._open_line = True
            return
        tenth = 10 * news.done // news.total if news.total else 10
        if self._shown.get((identity, news.phase)) != tenth:
            self._shown[identity, news.phase] = tenth
            self.line(text)

    def _close_line(self) -> None:
        if self._open_line:
            print("\r\x1b[2K", end="", file=self._out)
            self._open_line = False
