"""Tool calls told from a chat's text, by --tool-call-parser. Pure; called by reading.py.

A call is given out when it is complete. What does not read as a call stays text, so nothing of an answer is lost. What is given out
after some text is a function of that text alone, however it is cut into pieces.
"""

import json
from typing import Any, Protocol

import msgspec
from msgspec import Struct

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class Call(Struct, frozen=True):
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str


class Finder(Protocol):
    """One answer, piece by piece."""

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """What may be shown, and the calls that are complete."""
        ...

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when no text follows."""
        ...


class TaggedCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes' and Qwen's templates ask for, anywhere in an answer."""

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


class BareCalls:
    """An answer that is nothing but `{"name": ..., "parameters": {...}}`, or several with `;` between, as Llama 3's templates
    ask for."""

    __slots__ = ("_held", "_is_text")

    def __init__(self) -> None:
        self._held, self._is_text = "", False

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """All of it, unless it begins as a call does: then nothing before the end."""
        if self._is_text:
            return piece, []
        self._held += piece
        start = self._held.lstrip()
        if not start or PYTHON_TAG.startswith(start) or start.startswith(("{", PYTHON_TAG)):
            return "", []
        self._is_text, text, self._held = True, self._held, ""
        return text, []

    def finish(self) -> tuple[str, list[Call]]:
        """The calls, when no text follows; the text where it is none."""
        text, self._held = self._held, ""
        calls, rest = list[Call](), text.strip().removeprefix(PYTHON_TAG).strip()
        decoder = json.JSONDecoder()
        while rest:
            try:
                found, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return text, []
            call = _call(found)
            if call is None:
                return text, []
            calls.append(call)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
        return ("", calls) if calls else (text, [])


FINDERS: dict[str, type[Finder]] = {"hermes": TaggedCalls, "llama3_json": BareCalls}


def _read(body: str) -> Call | None:
    try:
        return _call(msgspec.json.decode(body.strip()))
    except (msgspec.DecodeError, RecursionError):
        return None


def _call(found: Any) -> Call | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return Call(found["name"], arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
