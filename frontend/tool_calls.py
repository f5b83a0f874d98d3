"""Tool calls told from a chat's text, by --tool-call-parser. Pure; called by reading.py.

A call is given out when it is complete. What does not read as a call stays text, so nothing of an answer is lost. What is given out
after some text is a function of that text alone, however it is cut into pieces, and the work is linear in it.
"""

import json
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from meshlm.frontend.tags import Lexer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
BLANKS = " \t\r\n"


class Call(Struct, frozen=True):
    """One call; `arguments` is the JSON text that the model wrote."""

    name: str
    arguments: str


class Finder(Protocol):
    """One answer, piece by piece."""

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Takes the next text; gives the content that may be shown, and the calls that are complete."""
        ...

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when no text follows."""
        ...


class TaggedCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes' and Qwen's templates ask for, anywhere in an answer."""

    __slots__ = ("_after_call", "_body", "_lexer")

    def __init__(self) -> None:
        self._lexer = Lexer(OPEN, CLOSE)
        self._body: list[str] | None = None  # what stands behind an opening tag so far
        self._after_call: list[str] | None = None  # the blanks since a call: nobody's if a call or the end follows

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Takes the next text; gives the content that may be shown, and the calls that are complete."""
        shown, calls = list[str](), list[Call]()
        for place, part in enumerate(self._lexer.push(piece)):
            self._take(part, place % 2 == 1, shown, calls)
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when no text follows: a call may lack its end."""
        shown, calls = list[str](), list[Call]()
        self._take(self._lexer.finish(), False, shown, calls)
        if self._body is not None:
            self._end("", shown, calls)
        self._after_call = None
        return "".join(shown), calls

    def _take(self, part: str, is_tag: bool, shown: list[str], calls: list[Call]) -> None:
        if self._body is None:
            if is_tag and part == OPEN:
                self._body = []
            else:
                self._text(part, shown)
        elif is_tag and part == CLOSE:
            self._end(CLOSE, shown, calls)
        else:
            self._body.append(part)

    def _text(self, text: str, shown: list[str]) -> None:
        if self._after_call is None:
            shown.append(text)
        elif not text or text.isspace():
            self._after_call.append(text)
        else:
            shown += [*self._after_call, text]
            self._after_call = None

    def _end(self, close: str, shown: list[str], calls: list[Call]) -> None:
        """Take in what stood between the tags: calls, and the text of what is none."""
        body, self._body = "".join(self._body or ()), None
        *parts, last = cut_calls(body)
        for part, end in (*((part, "") for part in parts), (last, close)):
            if call := read_call(part):
                calls.append(call)
                self._after_call = []
            else:
                self._text(OPEN + part + end, shown)


class BareCalls:
    """An answer that is nothing but `{"name": ..., "parameters": {...}}`, or several with `;` between, as Llama 3's templates
    ask for. An answer in JSON looks the same, so a call is one of a tool that the request names."""

    __slots__ = ("_begins", "_held", "_tools")

    def __init__(self, tools: Collection[str]) -> None:
        self._tools, self._held = tools, list[str]()
        self._begins: bool | None = None  # as a call does; None: not enough came to know

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Gives all text at once, unless it begins as a call does: then nothing before the end."""
        if self._begins is False:
            return piece, []
        self._held.append(piece)
        if self._begins or not piece:
            return "", []
        text = "".join(self._held)
        start = text.lstrip()
        if not start or (PYTHON_TAG.startswith(start) and start != PYTHON_TAG):
            self._held = [text]
            return "", []
        self._begins = start.startswith(("{", PYTHON_TAG))
        if self._begins:
            return "", []
        self._held = []
        return text, []

    def finish(self) -> tuple[str, list[Call]]:
        """The calls, when no text follows; the text where it is none."""
        text, self._held = "".join(self._held), []
        calls = list[Call]()
        rest = text.strip().removeprefix(PYTHON_TAG)
        decoder, at = json.JSONDecoder(), _skip(rest, 0, BLANKS)
        while at < len(rest):
            try:
                _, end = decoder.raw_decode(rest, at)
            except (ValueError, RecursionError):
                return text, []
            call = read_call(rest[at:end])
            if call is None or call.name not in self._tools:
                return text, []
            calls.append(call)
            at = _skip(rest, end, BLANKS + ";")
        return ("", calls) if calls else (text, [])


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at


# The finder of each parser, made from the names of the request's tools.
FINDERS: dict[str, Callable[[Collection[str]], Finder]] = {
    "hermes": lambda tools: TaggedCalls(),
    "llama3_json": BareCalls,
}
TAGGED = {"hermes"}  # whose calls stand between tags, and may so begin before the reasoning ends
# What may be a special token of the model's, which its decoder must show the finder.
TAGS = {"hermes": (OPEN, CLOSE), "llama3_json": (PYTHON_TAG,)}


class _Written(Struct):
    """A call as a model writes it; other keys say nothing that a client is told, such as "type": "function"."""

    name: str
    arguments: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET


def cut_calls(body: str) -> list[str]:
    """The texts between an opening and a closing tag that may be calls: an end may be missing; a tag may be text in a call."""
    return [body] if OPEN not in body or read_call(body) else body.split(OPEN)


def read_call(text: str) -> Call | None:
    """The call that this JSON is: it has a name and arguments, an object or one as text."""
    try:
        found = msgspec.json.decode(text.strip(), type=_Written)
        given = found.parameters if found.arguments is UNSET else found.arguments
        if given is UNSET or not found.name:
            return None
        arguments = bytes(given).decode()
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
        msgspec.json.decode(arguments, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return Call(found.name, arguments)
