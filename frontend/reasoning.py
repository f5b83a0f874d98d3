"""Reasoning told from the answer: what a model writes before `</think>` or the like (--reasoning-parser). Pure.

Called by parse.py and reading.py.

The opening tag may be the model's or already stand in the prompt. What is given out after some text is a function of that text alone,
however it is cut into pieces, so a stream that is taken up again repeats nothing.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.calls import ToolParser, Tools
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.tags import Lexer

_NONE: Tools = MappingProxyType({})
SWITCHES = ("enable_thinking", "thinking")  # of chat templates


def tags(parser: str) -> tuple[str, str]:
    """What may be special tokens of the model's, which its decoder must show."""
    found = registry.reasoning_parser(parser)
    return found.open, found.close


def begins(
    parser: str, template_kwargs: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], goes_on: bool
) -> bool:
    """Whether an answer begins with reasoning, or may do so. `goes_on`: it is the rest of the last message."""
    if not parser:
        return False
    found = registry.reasoning_parser(parser)
    if goes_on:
        before = messages[-1].get("content")
        return isinstance(before, str) and found.open in before and found.close not in before
    return not found.switchable or all(template_kwargs.get(switch) is not False for switch in SWITCHES)


class _State(Enum):
    """REASONING <-> CALL, a tag that opens a call stood there -> CONTENT, it was one."""

    REASONING = "reasoning"
    CALL = "call"
    CONTENT = "content"


class Splitter:
    """One answer that begins with reasoning, piece by piece. `closed` once all that follows is content.

    With `calls`, a whole tool call ends the reasoning too: models begin one without closing their reasoning. A tag of calls that is
    only spoken of ends nothing. What follows such a call is content; the closing tag that may still come is nobody's.
    """

    __slots__ = (
        "_begun",
        "_body",
        "_call_close",
        "_call_open",
        "_calls",
        "_held",
        "_lexer",
        "_parser",
        "_state",
        "_tools",
        "closed",
    )

    def __init__(self, parser: ReasoningParser, calls: ToolParser | None = None, tools: Tools = _NONE) -> None:
        self._parser, self._calls, self._tools = parser, calls, tools
        self._call_open, self._call_close = (calls.around if calls is not None else None) or ("", "")
        self._lexer = Lexer(*dict.fromkeys(filter(None, (parser.close, self._call_open, self._call_close))))
        self._held, self._begun, self._state = "", False, _State.REASONING
        self._body: list[str] = []  # what stands behind a tag that opens a call
        self.closed = False

    def push(self, piece: str) -> tuple[str, str]:
        """Takes the next text; gives the reasoning and the content that may be shown now."""
        if self.closed:
            return "", piece
        if not self._begun:
            piece = self._held + piece
            start = piece.lstrip()
            opening = self._parser.open
            if opening.startswith(start):  # not enough to know yet; all of it is the tag at most
                self._held = piece
                return "", ""
            if start.startswith(opening):
                piece = start.removeprefix(opening)
            elif not self._parser.assumed:
                self.closed, self._held = True, ""
                return "", piece
            self._begun, self._held = True, ""
        reasoning, content = list[str](), list[str]()
        for place, part in enumerate(self._lexer.push(piece)):
            self._take(part, place % 2 == 1, reasoning, content)
        if self.closed:
            content.append(self._lexer.finish())
        return "".join(reasoning), "".join(content)

    def finish(self) -> tuple[str, str]:
        """Gives the reasoning and the content that were held back, when no text follows."""
        if self.closed:
            return "", ""
        if not self._begun:
            held, self._held = self._held, ""
            if held.strip() == self._parser.open:
                return "", ""
            return (held, "") if self._parser.assumed else ("", held)
        reasoning, content = list[str](), list[str]()
        self._take(self._lexer.finish(), False, reasoning, content)
        if self._state is _State.CALL:
            self._end_call("", reasoning, content)
        return "".join(reasoning), "".join(content)

    def _take(self, part: str, is_tag: bool, reasoning: list[str], content: list[str]) -> None:
        if self.closed:
            content.append(part)
        elif is_tag and part == self._parser.close:
            if self._state is _State.CALL:
                reasoning += [self._call_open, *self._body]
            self.closed = True
        elif self._state is _State.CONTENT:
            content.append(part)
        elif self._state is _State.CALL:
            if is_tag and part == self._call_close:
                self._end_call(part, reasoning, content)
            else:
                self._body.append(part)
        elif is_tag and part == self._call_open:
            self._state, self._body = _State.CALL, []
        else:
            reasoning.append(part)

    def _end_call(self, close: str, reasoning: list[str], content: list[str]) -> None:
        """The text between two tags is complete: before the first tool call in it is reasoning, from that on content."""
        body = "".join(self._body)
        parts = body.split(self._call_open)
        if len(parts) > 1 and self._is_call(body, close, alone=True):
            parts = [body]
        first = next((place for place, part in enumerate(parts) if self._is_call(part, close)), None)
        reasoning += [self._call_open + part for part in parts[:first]]
        if first is None:
            reasoning.append(close)
            self._state = _State.REASONING
        else:
            content += [*(self._call_open + part for part in parts[first:]), close]
            self._state = _State.CONTENT

    def _is_call(self, body: str, close: str, *, alone: bool = False) -> bool:
        """Whether the parser of calls finds one in what stands between its tags; `alone`: and no text beside it."""
        assert self._calls is not None
        finder = self._calls.finder(self._tools)
        shown, calls = finder.push(self._call_open + body + close)
        rest, more = finder.finish()
        return bool(calls or more) and not (alone and shown + rest)


def fields(reasoning: str) -> dict[str, str]:
    """The reasoning by vLLM's name and by the older one, which many clients read."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}
