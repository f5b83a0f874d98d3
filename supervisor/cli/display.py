"""What the user sees while the mesh starts: one line per piece of news, redrawn in place on a terminal, or as JSON for a collector."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from meshlm.protocol.edges.control import News, Progress
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process import logs
from meshlm.runtime.process.streams import forgiving, json_line

EVERY_S = 5.0
MAX_NEWS = 64
ENDED = -1.0


class StartDisplay:
    """Prints progress to `out` (stderr): in place on a terminal, a line every few seconds elsewhere. `process`: with --log-format json
    it is in each line."""

    def __init__(
        self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic, process: str | None = None
    ) -> None:
        out = out or sys.stderr
        self._out = forgiving(out)
        self._process = process
        self._live = process is None and out.isatty()
        self._clock = clock
        self._shown: dict[tuple[Identity, str], float] = {}  # when a phase's last line was written or it began; ENDED
        self._open_line = False
        self._started = clock()
        self.news: deque[News] = deque(maxlen=MAX_NEWS)  # the last lines, for dashboards

    def line(self, text: str, level: str = "info") -> None:
        """A line that stays; `level` is for collectors."""
        self.news.append(News(time.time(), level, text))
        logs.record(text, level, process="supervisor")
        if self._process is not None:
            self._out.write(json_line(text, level, process=self._process))
            self._out.flush()
            return
        self._close_line()
        print(f"[{self._clock() - self._started:6.1f}s] {text}", file=self._out, flush=True)

    def progress(self, identity: Identity, news: Progress) -> None:
        amount = f" {news.done}/{news.total} {news.unit}".rstrip() if news.total else ""
        text = f"{identity}: {news.phase}{amount}"
        finished = news.done >= news.total
        if self._live and not finished:
            print(f"\r\x1b[2K[{self._clock() - self._started:6.1f}s] {text}", end="", file=self._out, flush=True)
            self._open_line = True
            return
        now = self._clock()
        last = self._shown.setdefault((identity, news.phase), now)
        if last != ENDED and (finished or now - last >= EVERY_S):
            self._shown[identity, news.phase] = ENDED if finished else now
            self.line(text)
        elif last == ENDED and not finished:  # a process that was replaced begins anew
            self._shown[identity, news.phase] = now

    def _close_line(self) -> None:
        if self._open_line:
            print("\r\x1b[2K", end="", file=self._out)
            self._open_line = False
