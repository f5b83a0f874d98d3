"""Tool calls told from a chat's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (--tool-call-parser hermes).

So Hermes' and Qwen's templates ask for them. Pure; called by reading.py. A call is given out when it is complete. What does not read as
a call stays text, so nothing of an answer is lost. What is given out after some text is a function of that text alone, however it is
cut into pieces.
"""

from typing import Any

import msgspec
from msgspec import Struct

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(Struct, frozen=True):
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str


class Finder:
    """One answer, piece by piece."""

    __slots__ = ("_after_call", "_held", "_inside")

    def __init__(self) -> None:
        self._held, self._inside = "", False
        self._after_call = (
            False  # nothing but blanks since a call: they are nobody's if another one follows, or the end
        )

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """What may be shown, and the calls that are complete."""
        text, shown, calls = self._held + piece, "", list[Call]()
        while True:
            before, tag, after = text.partition(CLOSE if self._inside else OPEN)
            if not tag:
                break
            if self._inside:
                shown += self._end(before, OPEN + before + CLOSE, calls)
            else:
                shown += self._between(before)
            self._inside, text = not self._inside, after
        if self._inside:
            self._held = text
            return shown, calls
        keep = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
        ready, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if self._after_call and not ready.strip():
            self._held = ready + self._held
            return shown, calls
        return shown + self._between(ready), calls

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when no text follows: a call may lack its end."""
        text, self._held, calls = self._held, "", list[Call]()
        if not self._inside:
            return self._between(text), calls
        self._inside = False
        return self._end(text, OPEN + text, calls), calls

    def _between(self, text: str) -> str:
        if self._after_call and not text.strip():
            return ""
        self._after_call = self._after_call and not text
        return text

    def _end(self, body: str, as_text: str, calls: list[Call]) -> str:
        """Take a call in; its text where it is none."""
        call = _read(body)
        self._after_call = call is not None
        if call is None:
            return as_text
        calls.append(call)
        return ""


def _read(body: str) -> Call | None:
    try:
        found: Any = msgspec.json.decode(body.strip())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return Call(found["name"], arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
