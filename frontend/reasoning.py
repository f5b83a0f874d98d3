"""Reasoning told from the answer: what a model writes before `</think>` or the like (--reasoning-parser). Pure.

Called by parse.py and reading.py.

The opening tag may be the model's or already stand in the prompt. What is given out after some text is a function of that text alone,
however it is cut into pieces, so a stream that is taken up again repeats nothing.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from meshlm.protocol.config import ServerConfig
from meshlm.protocol.grammar import ThinkingBudget
from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.calls import Call, Part, ToolParser, Tools
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.tags import Lexer

_NONE: Tools = MappingProxyType({})


def tags(parser: str) -> tuple[str, ...]:
    """What may be special tokens of the model's, which its decoder must show."""
    return registry.reasoning_parser(parser).tags


def changes_content(parser: str) -> bool:
    """Whether content is not what the model writes there."""
    found = registry.reasoning_parser(parser) if parser else None
    return found is not None and bool(found.hides or found.begins_content)


def opened(parser: str, template_kwargs: Mapping[str, Any], goes_on: bool) -> bool:
    """Whether reasoning that an answer begins with has been opened before it."""
    return goes_on or registry.reasoning_parser(parser).opens_in_prompt(template_kwargs)


def budget(server: ServerConfig, num_tokens: int, is_opened: bool) -> ThinkingBudget:
    """The budget of an answer that begins with reasoning."""
    found = registry.reasoning_parser(server.reasoning_parser)
    return ThinkingBudget(num_tokens, found.close, "" if is_opened else found.open, found.assumed or is_opened)


def before_grammar(server: ServerConfig, is_opened: bool, goes_on: bool) -> tuple[str, str]:
    """What stands around the reasoning of an answer that begins with it: its grammar begins behind. No opening text where there is
    reasoning without one."""
    if server.structured_outputs.enable_in_reasoning:
        return "", ""
    found = registry.reasoning_parser(server.reasoning_parser)
    if found.channels:
        return "", "" if goes_on else found.close
    return "" if is_opened or found.assumed else found.open, found.close


def begins(
    parser: str, template_kwargs: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], goes_on: bool
) -> bool:
    """Whether an answer begins with reasoning, or may do so. `goes_on`: it is the rest of the last message."""
    if not parser:
        return False
    found = registry.reasoning_parser(parser)
    if goes_on and not found.channels:
        before = messages[-1].get("content")
        return isinstance(before, str) and found.open in before and found.close not in before
    return found.reasons(template_kwargs)


class Thought(NamedTuple):
    """The reasoning that some text brought, what a call brought that began in it, and the text behind the reasoning."""

    reasoning: str
    parts: list[Part]
    rest: str


class Splitter:
    """One answer that begins with reasoning, piece by piece. `closed` once all that follows is content.

    With `calls`, a call ends the reasoning too: models begin one without closing their reasoning. A tag of calls that is only spoken of
    ends nothing. What follows such a call is content; the closing tag that may still come is nobody's. `finder` goes on with it.
    """

    __slots__ = ("_begun", "_called", "_held", "_lexer", "_parser", "closed", "finder")

    def __init__(self, parser: ReasoningParser, calls: ToolParser | None = None, tools: Tools = _NONE) -> None:
        self._parser, self._lexer = parser, Lexer(parser.close)
        self.finder = calls.finder(tools) if calls is not None and calls.ends_reasoning else None
        self._held, self._begun, self._called = "", False, False
        self.closed = False

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

    def _take(self, text: str, found: "_Found") -> None:
        self._sort([text] if self.finder is None else self.finder.push(text), found)

    def _close(self, found: "_Found") -> None:
        self.closed = True
        if not self._called:
            self._sort(self.finder.finish() if self.finder is not None else [], found)
            self.finder = None

    def _sort(self, parts: list[Part], found: "_Found") -> None:
        for part in parts:
            self._called |= isinstance(part, Call)
            if isinstance(part, str) and not self._called:
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


def fields(reasoning: str) -> dict[str, str]:
    """The reasoning by vLLM's name and by the older one, which many clients read."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}
