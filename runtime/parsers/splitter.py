"""Where the reasoning of an answer ends: told piece by piece, by frontends that show it and by workers that bound it. Pure.

The opening tag may be the model's or already stand in the prompt. What is given out after some text is a function of that text alone,
however it is cut into pieces, so a stream that is taken up again repeats nothing.
"""

from types import MappingProxyType
from typing import NamedTuple

from meshlm.runtime.parsers.calls import Call, Part, ToolParser, Tools
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.scan import Lexer

_NONE: Tools = MappingProxyType({})


class Thought(NamedTuple):
    """The reasoning that some text brought, what a call brought that began in it, and the text behind the reasoning."""

    reasoning: str
    parts: list[Part]
    rest: str


class Splitter:
    """One answer that begins with reasoning, piece by piece. `closed` once all that follows is content.

    With `calls`, a call ends the reasoning too: models begin one without closing their reasoning. A tag of calls that is only spoken of
    ends nothing. What follows such a call is content; the closing tag that may still come is nobody's. `finder` goes on with it."""

    __slots__ = ("_begun", "_held", "_lexer", "_parser", "_unsure", "called", "closed", "finder")

    def __init__(self, parser: ReasoningParser, calls: ToolParser | None = None, tools: Tools = _NONE) -> None:
        self._parser, self._lexer = parser, Lexer(parser.close)
        self.finder = calls.finder(tools) if calls is not None and calls.ends_reasoning else None
        self._held, self._begun, self.called = "", False, False
        self.closed = False
        self._unsure = ""

    def push(self, piece: str) -> Thought:
        """Takes the next text."""
        if self.closed:
            return Thought("", [], piece)
        if not self._begun:
            piece = self._held + piece
            start = piece.lstrip()
            opening = self._parser.open
            if opening.startswith(start):  # not enough to know yet; all of it is the tag at most
                self._held = piece
                return Thought("", [], "")
            if start.startswith(opening):
                piece = start.removeprefix(opening)
            elif not self._parser.assumed:
                self._held, self.closed, self.finder = "", True, None
                return Thought("", [], piece)
            self._begun, self._held = True, ""
        found = _Found()
        for place, part in enumerate(self._lexer.push(piece)):
            if self.closed:
                found.rest.append(part)
            elif place % 2 == 1 and not (self.finder is not None and self.finder.in_call):
                self._close(found)
            else:
                self._take(part, found)
        if self.closed:
            found.rest.append(self._lexer.finish())
        return found.thought()

    def finish(self) -> Thought:
        """What was held back, when no text follows."""
        if self.closed:
            return Thought("", [], "")
        if not self._begun:
            held, self._held, self.finder = self._held, "", None
            if held.strip() == self._parser.open:
                return Thought("", [], "")
            return Thought(held, [], "") if self._parser.assumed else Thought("", [], held)
        found = _Found()
        self._take(self._lexer.finish(), found)
        self._sort(self.finder.finish() if self.finder is not None else [], found)
        self.finder = None
        return found.thought()

    @property
    def is_over(self) -> bool:
        """Whether what follows is no reasoning: behind the closing text, or a call."""
        return self.closed or self.called

    @property
    def is_unsure(self) -> bool:
        """Whether the end of the text so far may yet become a call."""
        return self.finder is not None and bool((self._unsure + self._lexer.held).strip())

    def passes(self, text: bytes) -> bool:
        """Whether no part of this text, or of its beginnings, can tell anything: it is reasoning, and so is what was there before."""
        begins = self._parser.close.encode()[:1]
        return self._begun and self.finder is None and not self._lexer.held and begins not in text

    def _take(self, text: str, found: "_Found") -> None:
        if self.finder is None:
            self._sort([text], found)
            return
        parts = self.finder.push(text)
        self._unsure = (self._unsure + text)[sum(len(part) for part in parts if isinstance(part, str)) :]
        self._sort(parts, found)

    def _close(self, found: "_Found") -> None:
        self.closed = True
        if not self.called:
            self._sort(self.finder.finish() if self.finder is not None else [], found)
            self.finder = None

    def _sort(self, parts: list[Part], found: "_Found") -> None:
        for part in parts:
            self.called |= isinstance(part, Call)
            if isinstance(part, str) and not self.called:
                found.reasoning.append(part)
            else:
                found.parts.append(part)


class _Found:
    """What one piece brings."""

    __slots__ = ("parts", "reasoning", "rest")

    def __init__(self) -> None:
        self.reasoning, self.parts, self.rest = list[str](), list[Part](), list[str]()

    def thought(self) -> Thought:
        return Thought("".join(self.reasoning), self.parts, "".join(self.rest))
