"""What the log says of requests: one line for each, and one for each field that nobody knows. Owned by io.py.

Under load it is one line for a part of them (--log-requests-per-s), which says how many had none; requests that failed have one always.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from meshlm.frontend.openai.responses import Response
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.process.readable import readable

MAX_REASONS = 16  # that are told one by one; of more choices the line tells how many ended by which
MAX_UNKNOWN_SEEN, MAX_FIELD_NAME = 1000, 64  # fields that are named once in the log, and how much of each


class RequestLog:
    """The log lines of one frontend. `log` is the process's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._unknown_seen: set[str] = set()
        self._clock = clock
        self._lines, self._filled_at, self._left_out = (
            1.0,
            clock(),
            0,
        )  # that may be written now, since when, and were not

    def ignored(self, log: Any, unknown_fields: tuple[str, ...], path: str) -> None:
        """Name each field once."""
        for field in unknown_fields:
            name = readable(field, MAX_FIELD_NAME)
            if name not in self._unknown_seen and len(self._unknown_seen) < MAX_UNKNOWN_SEEN:
                self._unknown_seen.add(name)
                log.warning("unknown request field ignored", field=name, path=path)

    def _has_line(self, per_s: float) -> bool:
        """Whether there is a line left for a request that ended well. A second's worth may be used at once."""
        now = self._clock()
        self._lines = min(max(per_s, 1.0), self._lines + (now - self._filled_at) * per_s)
        self._filled_at = now
        if self._lines < 1:
            self._left_out += 1
            return False
        self._lines -= 1
        return True

    def ended(self, log: Any, answer: Response, seconds: float, path: str, status: int, per_s: float) -> None:
        """The one line of a request, if it has one."""
        if not self._has_line(per_s) and status == 200 and answer.error is None:
            return
        more = {"left_out": self._left_out} if self._left_out else {}
        self._left_out = 0
        usage = answer.usage()
        ended = [choice.finished.reason if choice.finished else FinishReason.ABORT for choice in answer.choices]
        reasons: Any = [reason.value for reason in ended]
        if len(reasons) > MAX_REASONS:
            reasons = dict(Counter(reasons))
        log.info(
            "request",
            id=answer.request_id,
            path=path,
            status=status,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            output_tokens=usage["completion_tokens"],
            finish_reason=reasons[0] if len(ended) == 1 else reasons,
            seconds=round(seconds, 3),
            error=answer.error.message if answer.error else None,
            **more,
        )
